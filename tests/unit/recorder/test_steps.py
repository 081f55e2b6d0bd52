"""The step machine, by tables: what hooks report, and the steps, phases and marks that come of it. Without torch."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from support.golden_sections import Golden

from ampmem.events import Phase
from ampmem.recorder.marker import Marker
from ampmem.recorder.steps import (
    FORWARD_UNSEEN,
    MOST_LOOKS,
    MOST_LOOKS_AT_EVALUATIONS,
    PATIENCE,
    WITHOUT_OPTIMIZER,
    Actions,
    Do,
    EndStep,
    Enter,
    Rounds,
    Say,
    SetMark,
    StepMachine,
)
from ampmem.vocabulary import Mark, StepOn

G, D = 1, 2
BOTH = (frozenset({G}), frozenset({D}))


def steps(updates: str, ran: dict[str, tuple[frozenset[int], ...]]) -> list[str]:
    """The steps that ``updates`` make, each letter an update after the forwards that ``ran`` has for it."""
    rounds, found, step = Rounds(), [], ""
    for letter in updates:
        if step and rounds.begun and not rounds.due():
            rounds.end()
            found.append(step)
            step = ""
        for models in ran[letter]:
            rounds.ran(models)
        rounds.update({"G": G, "D": D}[letter])
        step += letter
    return [*found, step]


ALONE = {"G": BOTH[:1], "D": BOTH[1:]}
GAN = {"G": BOTH, "D": BOTH}
ONE_MODEL = {"G": (frozenset({G, D}),), "D": (frozenset({G, D}),)}


@pytest.mark.parametrize(
    ("updates", "ran", "expected"),
    [
        ("GGG", ALONE, ["G", "G", "G"]),
        ("DGDGDG", GAN, ["DG", "DG", "DG"]),
        ("GDGDGD", GAN, ["GD", "GD", "GD"]),
        ("DDDDDGDDDDDGDDDDDG", GAN, ["DDDDDG", "DDDDDG", "DDDDDG"]),
        ("GDDDDDGDDDDDG", GAN, ["GD", "DDDDG", "DDDDDG"]),
        ("GGGGDDDDGGGGDDDD", ALONE, list("GGGGDDDDGGGGDDDD")),
        ("GGGGDDDDGGGGDDDD", ONE_MODEL, list("GGGGDDDDGGGGDDDD")),
        ("GGGGDDDDGGGGDDDD", {"G": BOTH[:1], "D": BOTH}, list("GGGGDDDDGGGGDDDD")),
        ("GGGGDDDDGGGG", GAN, ["GGGGD", *"DDDGGGG"]),
        ("G" * (PATIENCE + 3), GAN, ["G" * PATIENCE, "G", "G", "G"]),
        ("G" * PATIENCE + "D" + "GD", GAN, ["G" * PATIENCE, "D", "G", "D"]),
    ],
    ids=[
        "the only one",
        "a GAN",
        "the generator first",
        "a critic five times",
        "a critic five times, after the generator",
        "in turn, models apart",
        "in turn, one model",
        "in turn, the second on top of the first one's model",
        "in turn, both models running: known after the first change",
        "the other is idle",
        "the other was idle, and updates after all",
    ],
)
def test_which_updates_make_a_step(
    updates: str, ran: dict[str, tuple[frozenset[int], ...]], expected: list[str]
) -> None:
    assert steps(updates, ran) == expected


def test_an_optimizer_that_died_is_not_waited_for() -> None:
    rounds = Rounds()
    for models in BOTH:
        rounds.ran(models)
    rounds.update(D)
    assert rounds.due() == {G}
    rounds.died(G)
    assert rounds.due() == set()


def test_the_updates_of_one_that_died_stay_in_the_step() -> None:
    rounds = Rounds()
    rounds.made(D, "SGD")
    for models in BOTH:
        rounds.ran(models)
    rounds.update(D)
    rounds.died(D)
    rounds.made(D, "Adam")  # another, which gets the id of the first
    assert (rounds.begun, rounds.due(), list(rounds.updates.values())) == (True, {G}, [1])
    rounds.update(D)
    assert rounds.end() == ("the updates of several optimizers are combined into one step: SGD once, Adam once")


def test_an_update_without_a_forward_ends_no_step_of_its_own() -> None:
    rounds = Rounds()
    rounds.update(G)
    assert not rounds.begun


def test_one_that_steps_inside_another_is_left_out() -> None:
    rounds = Rounds()
    rounds.made(G, "Wrapper")
    rounds.made(D, "SGD")
    assert rounds.several
    rounds.ran(frozenset({D}))
    rounds.update(G)
    rounds.step_inside(D)
    assert (rounds.several, rounds.due()) == (False, set())
    rounds.ran(frozenset({D}))
    assert rounds.due() == set()
    rounds.died(D)
    rounds.made(D, "SGD")
    assert rounds.several


@pytest.mark.parametrize(
    ("names", "updates"),
    [("SGD", "11"), ("SGD Adam", "12"), ("SGD SGD", "12"), ("SGD SGD SGD", "1123"), ("SGD SGD", "112"), ("", "12")],
)
def test_what_is_said_of_updates_that_are_put_together(names: str, updates: str, golden: Golden) -> None:
    rounds = Rounds()
    for optimizer, name in enumerate(names.split(), start=1):
        rounds.made(optimizer, name)
    for each in updates:
        rounds.update(int(each))
    golden(str(rounds.end()))
    assert rounds.updates == {}


@pytest.mark.parametrize("updates", [PATIENCE - 1, PATIENCE])
def test_waiting_in_vain_is_said(updates: int) -> None:
    rounds = Rounds()
    rounds.made(G, "SGD")
    rounds.made(D, "Adam")
    for _ in range(updates):
        for models in BOTH:
            rounds.ran(models)
        assert rounds.due() == {G, D} - rounds.updates.keys()
        rounds.update(G)
    assert rounds.due() == (set() if updates == PATIENCE else {D})
    said = rounds.end()
    if updates == PATIENCE:
        assert said == (
            f"several updates are combined into one step (SGD {PATIENCE} times), because ampmem waited for an "
            "update of Adam, whose model ran, too; later steps do not wait for it"
        )
    else:
        assert said == f"several updates of one optimizer are combined into one step: SGD {updates} times"


def test_the_end_of_a_script_waits_only_for_those_that_have_updated() -> None:
    rounds = Rounds()
    for models in BOTH:
        rounds.ran(models)
    rounds.update(G)
    assert (rounds.due(), rounds.due(ever=True)) == ({D}, set())


LETTERS = {
    Phase.SETUP: "S",
    Phase.DATA: "D",
    Phase.FORWARD: "F",
    Phase.BACKWARD: "B",
    Phase.OPTIMIZER: "O",
    Phase.EVALUATION: "E",
    Phase.BETWEEN: ".",
}
MARKS = {Mark.AFTER_FORWARD: "f", Mark.AFTER_BACKWARD: "b", Mark.AFTER_OPTIMIZER: "o"}


@dataclass
class Optimizer:
    """What the machine may ask of one."""

    trains: bool = True
    gradients: bool = False


@dataclass
class Script:
    """Drives a machine as a session does, and writes down what it does.

    ``text`` has a letter for each phase that is entered and each mark, and ``|`` where a step ends, with the number of
    the event after which it had ended, where that was known only later.
    """

    step_on: StepOn | Marker = StepOn.FOUND
    steps: int = 99
    optimizers: dict[int, Optimizer] = field(default_factory=dict)
    text: str = ""
    done: list[Do] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    event: int = 0

    def __post_init__(self) -> None:
        self.machine = StepMachine(self.step_on, self)
        self.machine.recording = True

    def trains(self, optimizer: int) -> bool:
        return self.optimizers[optimizer].trains

    def has_gradients(self, optimizer: int) -> bool:
        return self.optimizers[optimizer].gradients

    def make(self, *optimizers: int, frozen: int | None = None) -> None:
        for optimizer in optimizers:
            self.optimizers[optimizer] = Optimizer(trains=optimizer != frozen)
            self.machine.rounds.made(optimizer, "SGD", trains=optimizer != frozen)

    def act(self, actions: Actions) -> None:
        for action in actions:
            match action:
                case Do.BEGIN_STEP:
                    self.machine.step_began()
                case Do():
                    self.done.append(action)
                case Enter(phase):
                    self.text += LETTERS[phase]
                case SetMark(mark):
                    self.text += MARKS[mark]
                case Say(message):
                    self.said.append(message)
                case EndStep(ended_ns):
                    self.text += "|" if ended_ns is None else f"|{ended_ns}"
                    self.end()

    def end(self) -> None:
        self.steps -= 1
        if not self.machine.recording:
            return
        if self.steps == 0:
            self.machine.recording = False
        else:
            self.machine.step_began()

    def forward(
        self, *ran: int, grad: bool = True, raised: bool = False, observed: bool = False, stepping: bool = False
    ) -> None:
        self.enter(*ran, grad=grad, observed=observed)
        self.act(self.machine.forward_ended(raised=raised, grad=grad, stepping=stepping))

    def enter(self, *ran: int, grad: bool = True, observed: bool = False, recomputing: bool = False) -> None:
        held = frozenset(ran) if self.machine.rounds.several else None
        self.act(self.machine.forward_started(held, grad=grad, observed=observed, recomputing=recomputing))

    def backward(self, *inside: Callable[[], None], raised: bool = False, differentiable: bool = False) -> None:
        self.act(self.machine.backward_started(in_forward=False))
        for each in inside:
            each()
        for optimizer in self.optimizers.values():
            optimizer.gradients = optimizer.trains
        self.return_from_backward(raised=raised, differentiable=differentiable)

    def return_from_backward(
        self, *, raised: bool = False, differentiable: bool = False, stepping: bool = False, grad: bool = True
    ) -> None:
        ended = self.machine.backward_ended(
            self.event, raised=raised, differentiable=differentiable, grad=grad, observed=False, stepping=stepping
        )
        self.act(ended)

    def update(self, optimizer: int = G, *, in_backward: bool = False) -> None:
        self.act(self.machine.update_started())
        self.act(self.machine.updated(optimizer, self.event, in_backward=in_backward))

    def data(self) -> None:
        before = self.machine.phase
        self.act(self.machine.data_started())
        self.act(self.machine.data_ended(before))

    def transform(self) -> None:
        before = self.machine.phase
        self.act(self.machine.data_started(transform=True))
        self.act(self.machine.data_ended(before))

    def play(self, events: str) -> str:
        """``events`` by their letters; the number of each is when it ends."""
        played: dict[str, Callable[[], None]] = {
            "m": lambda: self.make(G),
            "n": lambda: self.make(D),
            "f": self.forward,
            "g": lambda: self.forward(G),  # a model whose parameters G holds,
            "h": lambda: self.forward(D),
            "2": lambda: self.forward(G, D),  # and one whose parameters are theirs
            "e": lambda: self.forward(grad=False),
            "x": lambda: self.forward(raised=True),
            "b": self.backward,
            "B": lambda: self.backward(raised=True),
            "c": lambda: self.backward(self.recompute),
            "p": lambda: self.backward(differentiable=True),
            "i": lambda: self.backward(lambda: self.update(in_backward=True)),
            "u": self.update,
            "v": lambda: self.update(D),
            "d": self.data,
            "t": self.transform,
            "r": lambda: self.act(self.machine.function_returned()),
            "s": lambda: self.act(self.machine.manual_step()),
            ".": lambda: self.act(self.machine.script_over()),
        }
        for letter in events.replace(" ", ""):
            self.event += 1
            played[letter]()
        return self.text

    def did(self) -> list[Do]:
        """What was done since this was asked last."""
        done, self.done = self.done, []
        return done

    def recompute(self) -> None:
        self.enter(recomputing=True)
        self.act(self.machine.forward_ended(raised=False, grad=True, stepping=False))


STEP = "FBf.bO.o|"
FUNCTION = Marker(text="train.py:step", file=("train.py",), name="step")


@pytest.mark.parametrize(
    ("step_on", "events", "expected"),
    [
        # One optimizer: each update ends a step.
        (StepOn.FOUND, "m fbu fbu", STEP * 2),
        (StepOn.FOUND, "m dfbu dfbu", "DSFBf.bO.o|D.FBf.bO.o|"),
        (StepOn.FOUND, "m fb fb fbu", "FBf.bFBf.bFBf.bO.o|"),
        (StepOn.FOUND, "m f f bu", "FFBf.bO.o|"),
        (StepOn.FOUND, "m fcu fbu", STEP * 2),
        (StepOn.FOUND, "m fbu e fbu", f"{STEP}E.{STEP}"),
        (StepOn.FOUND, "m e fbu", "ES" + STEP),
        (StepOn.FOUND, "m fpbu", "FBf.bFBf.bO.o|"),
        (StepOn.FOUND, "m fi fi", "FBfOBo.b|FBfOBo.b|"),
        (StepOn.FOUND, "m fBu", "FBf.bO.o|"),
        (StepOn.FOUND, "m u fbu", "O.o|" + STEP),
        (StepOn.FOUND, "m f t b u t f", "FBf.bO.o|D.F"),
        (StepOn.FOUND, "m t f", "DSF"),
        (StepOn.FOUND, "m f b t u", "FBf.bO.o|"),
        (StepOn.FOUND, "m f d b u", "FDFBf.bO.o|"),  # the next batch
        (StepOn.FOUND, "m f d t b u", "FDFBf.bO.o|"),  # then a loss that is a module
        (StepOn.FOUND, "m f b d t u", "FBf.bD.D.O.o|"),
        (StepOn.FOUND, "m fbu d", STEP + "D."),
        # No optimizer: each backward, known at the next forward or at the end.
        (StepOn.FOUND, "fb fb.", "FBf.b|2FBf.b|4"),
        (StepOn.FOUND, "fB fb.", "FBf.bFBf.b|4"),
        (StepOn.FOUND, "fbs fbs.", "FBf.b|FBf.b|"),
        (StepOn.FOUND, "b fb.", "Bf.bFBf.b|3"),
        # Two optimizers: a GAN, and one backward for both.
        (StepOn.FOUND, "mn hghbv hgbu hghbv", "FFFBf.bO.oFFBf.bO.o|FFFBf.bO.o"),
        (StepOn.FOUND, "mn 2buv 2buv.", "FBf.bO.oO.o|FBf.bO.oO.o|"),
        (StepOn.FOUND, "mn 2bu 2bu.", "FBf.bO.o|5FBf.bO.o|8"),
        (StepOn.FOUND, "mn gbu hbv gbu", STEP * 3),
        # The user says what ends a step.
        (StepOn.BACKWARD, "m fbu fbu", "FBf.b|O.oFBf.b|O.o"),
        (StepOn.BACKWARD, "fb fb", "FBf.b|FBf.b|"),
        (StepOn.BACKWARD, "b fb", "Bf.bFBf.b|"),
        (StepOn.OPTIMIZER, "mn hghbv hgbu", "FFFBf.bO.o|FFBf.bO.o|"),
        (StepOn.OPTIMIZER, "fbfb", "FBf.bFBf.b"),
        (StepOn.OPTIMIZER, "m fi", "FBfOBo.b|"),
        (StepOn.FORWARD, "eee", "F.|F.|F.|"),
        (StepOn.FORWARD, "fe", "F|F.|"),
        (StepOn.FORWARD, "xe", "FF.|"),
        (StepOn.FORWARD, "m fbu", "F|Bf.bO.o"),
        (FUNCTION, "r m fbur fbufbur", "FBf.bO.o|FBf.bO.oFBf.bO.o|"),
        (FUNCTION, "eer er", "F.F.|F.|"),
        (FUNCTION, "fb e r", "FBf.bE.|"),
        (StepOn.FOUND, "m fbs fbus fbu", "FBf.b|FBf.bO.o|FBf.bO.o"),
        (FUNCTION, "fs r f", "F|F"),
        (StepOn.FORWARD, "fs f", "F||F"),
    ],
)
def test_what_makes_steps_and_phases(step_on: StepOn | Marker, events: str, expected: str) -> None:
    assert Script(step_on).play(events) == expected


@pytest.mark.parametrize(("events", "begun"), [("b", False), ("m", False), ("m b", True), ("m t", False)])
def test_a_backward_begins_the_first_step_if_an_optimizer_is_there(events: str, begun: bool) -> None:
    """The model ran where no module is called, as in a compiled function."""
    script = Script()
    script.play(events)
    assert script.machine.begun == begun
    assert script.said == [FORWARD_UNSEEN] * begun


@pytest.mark.parametrize(("closure", "expected"), [("fb", "OFBf.Ob"), ("fpb", "OFBf.ObBf.Ob"), ("fbb", "OFBf.ObBf.Ob")])
def test_a_backward_in_a_closure_does_not_look_like_one_that_an_update_interrupts(closure: str, expected: str) -> None:
    """A phase lies between two backwards of a closure, or the analysis puts the end of forward at the first of them."""
    script = Script()
    script.make(G)
    script.act(script.machine.update_started())
    for letter in closure:
        if letter == "f":
            script.forward(stepping=True)
            continue
        script.act(script.machine.backward_started(in_forward=False))
        script.return_from_backward(differentiable=letter == "p", stepping=True)
    script.act(script.machine.updated(G, 0, in_backward=False))
    assert script.text == f"{expected}.o|"
    assert script.said == []  # the update did see a forward


def test_an_update_that_calls_no_module_says_that_none_was_seen() -> None:
    script = Script()
    script.play("m u fbu")
    assert script.said == [FORWARD_UNSEEN]


def test_nothing_is_waited_for_that_is_frozen() -> None:
    script = Script()
    script.make(G, D, frozen=G)
    assert script.play("hghbv hghbv.") == "FFFBf.bO.o|5FFFBf.bO.o|10"


IN_TURN = {"G": "gh", "g": "g", "D": "gh", "d": "h"}
"""The models that run before an update of G or D: a small letter is a loss of one model alone."""


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        ("GD GD GD", ["GD", "GD", "GD"]),
        ("DG DG DG", ["DG", "DG", "DG"]),
        ("GgDd GD GD GgDd GD", ["GgDd", "GD", "GD", "GgDd", "GD"]),
        ("DDDG DDDG DDDG", ["DDDG", "DDDG", "DDDG"]),
        ("dddddd", ["d"] * 6),
        ("DDDDDDDDDD", ["DDDDDDDD", "D", "D"]),
    ],
)
def test_models_that_are_frozen_in_turn(updates: str, expected: list[str]) -> None:
    """Which models train is known at each forward: a step goes on while the first one's is frozen.

    The first step waits for an optimizer that could train when it was made, but not forever.
    """
    script, found = Script(), [""]
    script.make(G, D)
    for letter in updates.replace(" ", ""):
        script.optimizers[G].trains, script.optimizers[D].trains = letter in "Gg", letter in "Dd"
        for event in (*IN_TURN[letter], "b"):
            ended = script.text.count("|")
            script.play(event)
            if script.text.count("|") > ended:
                found.append("")
        found[-1] += letter
        script.play("u" if letter in "Gg" else "v")
    assert [step for step in found if step] == expected


def test_a_forward_of_both_models_before_one_is_frozen_again() -> None:
    """As pix2pix trains: G runs once for both, before D, which was frozen while G trained, is made to train again."""
    script = Script()
    script.make(G, D)
    for _ in range(2):
        script.play("g")
        script.optimizers[D].trains = True
        script.play("hbv")
        script.optimizers[D].trains = False
        script.play("hbu")
    script.play(".")
    assert script.text == "FFBf.bO.oFBf.bO.o|7FFBf.bO.oFBf.bO.o|14"


def test_a_frozen_model_is_waited_for_again_once_it_trains() -> None:
    script = Script()
    script.make(G, D)
    script.optimizers[G].trains = False
    script.play("hghb")
    script.optimizers[G].trains = True
    assert script.play("v") == "FFFBf.bO.o"


def test_a_model_that_runs_in_evaluation_is_no_part_of_a_step() -> None:
    script = Script()
    script.make(G, D)
    script.forward(D)
    script.act(script.machine.forward_started(None, grad=False, observed=False, recomputing=False))
    script.act(script.machine.forward_ended(raised=False, grad=False, stepping=False))
    assert script.play("bv") == "FEFBf.bO.o|"


def test_the_last_step_ends_the_forward_that_shows_it() -> None:
    """A step that has ended some time ago is known at the next forward, of which nothing is observed then."""
    script = Script(steps=1)
    script.play("f b")
    script.done.clear()
    script.enter()
    assert (script.text, script.done) == ("FBf.b|2", [])
    assert not script.machine.recording


def test_what_a_step_does_in_its_order() -> None:
    script = Script()
    script.make(G)
    script.forward()
    assert script.did() == [Do.PAUSE, Do.SEE_MODEL, Do.OBSERVE, Do.END_FORWARD]
    script.backward(script.recompute)
    assert script.did() == [
        *(Do.LEAVE, Do.LOOK, Do.BEGIN_BACKWARD),  # the engine starts without our mode
        *(Do.OBSERVE_AGAIN, Do.KEEP_RECOMPUTED, Do.LEAVE_OPS),
        *(Do.END_BACKWARD, Do.NOTE_INPUTS),
    ]
    script.update()
    assert script.did() == [Do.LEAVE_OPS, Do.LOOK, Do.END_UPDATE]
    script.forward()
    assert script.did() == [Do.LOOK, Do.PAUSE, Do.SEE_MODEL, Do.OBSERVE, Do.END_FORWARD]
    script.forward()  # the step has looked back already
    assert script.done == [Do.PAUSE, Do.SEE_MODEL, Do.OBSERVE, Do.END_FORWARD]


def test_an_evaluation_looks_at_what_is_kept_before_each_batch() -> None:
    script = Script()
    script.play("m fbu")
    script.done.clear()
    script.forward(grad=False)
    assert script.done == [Do.LOOK_INSIDE, Do.PAUSE, Do.SEE_MODEL, Do.OBSERVE, Do.END_FORWARD]
    for _ in range(MOST_LOOKS_AT_EVALUATIONS):
        script.forward(grad=False)
    assert script.done.count(Do.LOOK_INSIDE) == MOST_LOOKS_AT_EVALUATIONS
    script.play("fbu")
    assert script.done.count(Do.LOOK) == 3  # those of the step itself


def test_an_evaluation_alone_is_recorded_from_its_first_batch_to_the_next_training() -> None:
    script = Script(StepOn.EVALUATION)
    script.machine.recording = False
    script.act(script.machine.skimmed(None))
    script.act(script.machine.skimmed_over())
    assert (script.done, script.text) == ([], "")  # a forward that trains ends no step
    script.act(script.machine.skimmed(None, evaluates=True))
    assert script.done == [Do.BEGIN]
    script.machine.recording = True
    script.machine.step_began()
    script.forward(grad=False)
    assert (script.text, script.did()[-1]) == ("F.F", Do.END_FORWARD)  # a loss belongs to the batch: it stays observed
    script.forward()  # in eval mode, without no_grad
    assert (script.text, script.done[:2]) == ("F.F|F.F", [Do.LEAVE, Do.NOTE_HOLDERS])
    script.done.clear()
    script.act(script.machine.forward_started(None, grad=True, observed=False, recomputing=False, trains=True))
    assert (script.text, script.done) == ("F.F|F.F|", [Do.LEAVE, Do.NOTE_HOLDERS, Do.END])


def test_skipped_batches_of_an_evaluation_are_steps() -> None:
    script = Script(StepOn.EVALUATION)
    script.machine.recording = False
    script.act(script.machine.skimmed(None, evaluates=True))
    script.act(script.machine.skimmed_over())
    assert (script.done, script.text) == ([Do.BEGIN], "|")


def test_an_evaluation_inside_a_forward_lets_that_go_on() -> None:
    """As one that a hook of the model runs: forward stays observed."""
    script = Script()
    script.enter()
    script.done.clear()
    script.forward(grad=False, observed=True)
    assert script.done == [Do.LOOK_INSIDE, Do.PAUSE, Do.SEE_MODEL, Do.OBSERVE]
    assert script.text == "FEF"


def test_inference_notes_who_holds_what_at_each_end() -> None:
    script = Script(StepOn.FORWARD)
    script.forward(grad=False)
    assert script.done[-3:] == [Do.END_FORWARD, Do.LEAVE, Do.NOTE_HOLDERS]
    script = Script(FUNCTION)
    script.play("e r")
    assert script.done[-1] is Do.NOTE_HOLDERS
    script.done.clear()
    script.play("f b r")
    assert Do.NOTE_HOLDERS not in script.done


def test_an_evaluation_notes_who_holds_what_after_few_of_its_batches() -> None:
    script = Script(StepOn.EVALUATION)
    noted = []
    for batch in range(1, 18):
        script.done.clear()
        script.forward(grad=False)
        noted += [batch] if Do.NOTE_HOLDERS in script.done else []
    assert noted == [2, 3, 5, 9, 17]  # a batch ends where the next begins


def test_a_forward_inside_which_the_engine_ran_goes_on_after_it() -> None:
    """torch.func.grad, or a model that computes forces: its step does not end there."""
    script = Script()
    script.enter()
    script.act(script.machine.backward_started(in_forward=True))
    assert script.machine.in_engine
    script.return_from_backward()
    assert not script.machine.in_engine
    assert script.done[-4:] == [Do.NOTE_INPUTS, Do.PAUSE, Do.SEE_MODEL, Do.OBSERVE]
    script.act(script.machine.forward_ended(raised=False, grad=True, stepping=False))
    assert script.play("b.") == "FBf.bFBf.b|1"


def test_inside_an_update_the_phase_goes_back_to_it() -> None:
    """LBFGS runs forward and backward inside its step, and evaluates its line search without gradients."""
    script = Script()
    script.make(G)
    script.act(script.machine.update_started())
    script.enter()
    script.act(script.machine.forward_ended(raised=False, grad=True, stepping=True))
    script.act(script.machine.backward_started(in_forward=False))
    script.return_from_backward(stepping=True)
    script.enter(grad=False)
    script.act(script.machine.forward_ended(raised=False, grad=False, stepping=True))
    script.act(script.machine.updated(G, 7, in_backward=False))
    assert script.text == "OFBf.ObEO.o|"


def test_variables_are_looked_at_only_so_often_in_a_step() -> None:
    script = Script()
    script.play("m f" + "b" * (MOST_LOOKS + 3))
    assert script.done.count(Do.LOOK) == MOST_LOOKS
    script.play("u")
    script.done.clear()
    script.play("f b")
    assert script.done.count(Do.LOOK) == 2


def test_what_is_said() -> None:
    script = Script()
    script.play("fb f")
    assert script.said == [WITHOUT_OPTIMIZER]
    script = Script()
    script.play("mn 2buv")
    assert script.said == ["the updates of several optimizers are combined into one step: SGD once each (2 optimizers)"]
    for step_on in (StepOn.BACKWARD, FUNCTION):
        script = Script(step_on)
        script.play("mn 2uvb r")
        assert script.said == []
    script = Script()
    script.play("mn 2b s 2buvs")
    assert script.said == []


def test_steps_that_are_not_recorded_end_without_phases() -> None:
    script = Script()
    script.machine.recording = False
    script.make(G, D)

    def skim(*ran: int) -> None:
        script.act(script.machine.skimmed(frozenset(ran)))
        script.act(script.machine.skimmed_over())

    skim(D)
    skim(G)
    script.play("bv")
    assert script.text == ""
    skim(G)
    script.play("bu")
    assert (script.text, script.done) == ("|", [Do.END_BACKWARD, Do.END_BACKWARD])


def test_without_an_optimizer_each_backward_that_is_not_recorded_ends_a_step() -> None:
    script = Script()
    script.machine.recording = False
    assert script.play("bb") == "||"


def test_a_skimmed_forward_ends_a_step_where_forwards_do() -> None:
    script = Script(StepOn.FORWARD)
    script.machine.recording = False
    script.act(script.machine.skimmed(None))
    script.act(script.machine.skimmed_over())
    assert script.text == "|"
    script.machine.recording = True
    script.act(script.machine.skimmed_over())
    assert script.text == "|"


def test_a_step_that_ended_before_the_recording_began_is_settled_first() -> None:
    """The skimmed forward that shows it may begin the recording: then the model's run is told by forward itself."""
    script = Script()
    script.machine.recording = False
    script.make(G, D)
    script.act(script.machine.skimmed(frozenset({G, D})))
    script.play("bu")

    def begin(actions: Actions) -> None:
        for action in actions:
            assert action == EndStep(2)
            script.machine.recording = True

    script.event = 2
    begin(script.machine.skimmed(frozenset({G, D})))
    assert not script.machine.rounds.beside


def test_a_child_that_was_forked_settles_nothing() -> None:
    script = Script()
    script.play("fb")
    script.act(script.machine.backward_started(in_forward=True))
    script.machine.forget()
    assert (script.machine.recording, script.machine.in_engine) == (False, False)
    script.text = ""
    assert script.play(".") == ""
