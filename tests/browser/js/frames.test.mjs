import assert from "node:assert/strict";
import { test } from "node:test";
import { isLibraryFrame } from "../../../ampmem/reporters/html/js/data/frames.js";

test("frames of torch, of launchers and of what runs a script are no one's own", () => {
  for (const frame of [
    "/v/lib/python3.11/site-packages/torch/nn/modules/linear.py:134 Linear.forward",
    "/usr/local/lib/python3.10/dist-packages/torch/nn/functional.py:2987 layer_norm",
    "/build/pytorch/torch/optim/adamw.py:12 step",
    "/env/torch/nn/modules/module.py:1520 _call_impl",
    "/env/torch/nn/functional.py:2509 batch_norm",
    "/env/torch/_tensor.py:522 backward",
    "/env/site-packages/ipykernel/kernelbase.py:545 dispatch_queue",
    "/usr/lib/python3.11/asyncio/base_events.py:603 run_forever",
    "/v/lib/python3.11/site-packages/click/core.py:1560 Command.main",
    "/v/lib/python3.11/site-packages/accelerate/commands/launch.py:1 main",
    "/v/bin/torchrun:8 <module>",
    "<frozen runpy>:198 _run_module_as_main",
    "<frozen importlib._bootstrap>:1 _load",
    "/usr/lib/python3.11/threading.py:982 Thread.run",
    "/usr/lib/python3.11/concurrent/futures/thread.py:58 _WorkItem.run",
    "/usr/lib/python3.12/multiprocessing/process.py:108 BaseProcess.run",
    "/v/lib/python3.11/site-packages/ampmem/recorder/script.py:90 run",
  ]) assert.ok(isLibraryFrame(frame), frame);
});

test("frames of the script, of its libraries and of the workloads are not hidden", () => {
  for (const frame of [
    "/home/me/train.py:12 <module>",
    "/home/me/torch/train.py:12 main",
    "/home/me/torch/nn/train.py:12 main",
    "/work/ipykernel_114/3105878423.py:21 <module>",
    "/home/me/threading.py:1 go",
    "train.py:3 torch.nn",
    "/v/lib/python3.11/site-packages/transformers/models/gpt2/modeling_gpt2.py:547 GPT2Model.forward",
    "/v/lib/python3.11/site-packages/torchvision/models/resnet.py:9 ResNet.forward",
    "/v/lib/python3.11/site-packages/accelerate/accelerator.py:9 Accelerator.backward",
    "/v/lib/python3.11/site-packages/ampmem/workloads/gpt.py:61 GPT.forward",
    "",
  ]) assert.ok(!isLibraryFrame(frame), frame);
});
