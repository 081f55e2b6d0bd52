/** Which frames of a Python stack are nobody's own code: torch's, ampmem's, and those that start a script. */

const LIBRARY = new RegExp(
  [
    // Torch, installed or built from its sources.
    "/(?:(?:site|dist)-packages|pytorch)/torch/",
    "/torch/(?:nn/(?:modules|parallel)|optim|autograd|utils|_\\w+)/",
    "/torch/(?:nn/functional|functional|_\\w+)\\.py:",
    // Notebooks.
    "/(?:site|dist)-packages/(?:ipykernel|IPython|tornado|traitlets)/",
    "/(?:site|dist)-packages/ipykernel_launcher\\.py:",
    // Launchers, and what calls a script's main function with its arguments.
    "/(?:site|dist)-packages/(?:accelerate/commands|deepspeed/launcher|click|typer|fire|hydra|absl)/",
    "/bin/(?:torchrun|accelerate|deepspeed|ampmem):",
    // Python's own that runs a script, a thread or a process.
    "^<frozen (?:runpy|importlib)",
    "/python3[.\\d]*/(?:runpy|threading|contextlib)\\.py:",
    "/python3[.\\d]*/(?:asyncio|importlib|concurrent|multiprocessing)/",
    "/ampmem/(?:cli|recorder|simulator)/",
    "/ampmem/__main__\\.py:",
  ].join("|"),
);

/**
 * Whether a frame tells nothing of the script: of torch, of ampmem itself or of a launcher.
 * @param {string} frame "file:line function"
 */
export function isLibraryFrame(frame) {
  return LIBRARY.test(frame);
}
