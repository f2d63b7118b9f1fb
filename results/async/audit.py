"""Runs a recipe against a vLLM server and writes down what passed between the two, and what was trained.

    python results/async/audit.py OUT.json recipes/minirl_sync.py --engine vllm ...     (the recipe's own options)

Nothing of the run is changed: methods are timed and their arguments read. OUT.json holds

    pushes       of each push: label, seconds in all, to write the file, until the server has loaded it, to prove it
    copies       seconds that the trainer spent on copying its weights and scoring the probe, a push each
    generations  seconds, tokens and sequences of each sampling for training
    sampled      [random stream, digest of prompt and completion] of each sequence that came back for training
    trained      [update, digest] of each sequence that reached the loss of an update
    failed       the requests that failed, by what was seen: {sentence: times}
    retries, restarts, asked, open, stale    requests sent again, pushes after a restart; groups asked for, not used yet, dropped
    error        the last sentence of a run that stopped, else null

OUT.events grows during the run: a line at the start of each sampling and of each push, for whoever wants to disturb it.
"""

import hashlib
import importlib
import json
import os
import re
import shlex
import sys
import threading
import time
from collections import Counter
from multiprocessing import get_context
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "recipes")]

import torch  # noqa: E402

import vllm_engine  # noqa: E402
from async_rollout import RECYCLED_STREAM, AsyncTrainer  # noqa: E402
from rlvr_common import EVAL_STREAM, RLVRTrainer  # noqa: E402
from vllm_engine import DiskTransfer, VLLMEngine  # noqa: E402


def digest(prompt, completion):
    return hashlib.blake2b(f"{prompt} {completion}".encode(), digest_size=8).hexdigest()


def for_training(streams):
    return [s for s in streams if not EVAL_STREAM <= s < RECYCLED_STREAM]


class Audit:
    """Wraps the methods that weights, samples and batches pass through."""

    def __init__(self, out):
        self.out, self.events, self.lock = Path(out), Path(out).with_suffix(".events"), threading.Lock()
        self.events.write_text("")
        self.pushes, self.copies, self.generations, self.sampled, self.trained = [], [], [], [], []
        self.failed, self.parts, self.trainer, self.engine = Counter(), {}, None, None
        for owner, name in (
            (VLLMEngine, "_attempt"), (VLLMEngine, "_push"), (VLLMEngine, "_prove"), (VLLMEngine, "copy_weights"),
            (VLLMEngine, "generate"), (DiskTransfer, "send"), (DiskTransfer, "load"), (RLVRTrainer, "score"),
        ):  # fmt: skip
            self.wrap(owner, name)

    def wrap(self, owner, name):
        original, ours = getattr(owner, name), getattr(self, name.strip("_"))
        setattr(owner, name, lambda this, *args, **kwargs: ours(original, this, *args, **kwargs))

    def event(self, *words):
        with self.lock, self.events.open("a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    def timed(self, part, original, *args, **kwargs):
        begun = time.monotonic()
        try:
            return original(*args, **kwargs)
        finally:
            self.parts[part] = time.monotonic() - begun

    # ---- one method for each that is wrapped

    def attempt(self, original, engine, work, what, *args, **kwargs):
        def watched():
            try:
                return work()
            except (vllm_engine.ServerGone, vllm_engine.ServerBusy, vllm_engine.StaleServer, ValueError) as error:
                seen = re.sub(r"http://\S+?(/|: |$)", r"\1", f"{what}: {error}")
                with self.lock:
                    self.failed[seen] += 1
                raise

        return original(engine, watched, what, *args, **kwargs)

    def push(self, original, engine, weights, label):
        self.event("push", label)
        self.parts = {}
        self.timed("seconds", original, engine, weights, label)
        parts = self.parts
        self.pushes.append(
            {
                "label": label, "seconds": parts["seconds"], "write": parts["send"] - parts["load"],
                "load": parts["load"], "prove": parts["prove"],
            }
        )  # fmt: skip

    def prove(self, original, *args):
        self.timed("prove", original, *args)

    def send(self, original, *args):
        self.timed("send", original, *args)

    def load(self, original, *args):
        self.timed("load", original, *args)

    def copy_weights(self, original, *args):
        begun = time.monotonic()
        weights = original(*args)
        self.copies.append(time.monotonic() - begun)
        return weights

    def generate(self, original, engine, prompts, limit, **options):
        self.engine, streams = engine, for_training(options["sequence_ids"])
        if not streams:
            return original(engine, prompts, limit, **options)
        self.event("generate", len(self.generations) + 1)
        begun = time.monotonic()
        rollout = original(engine, prompts, limit, **options)
        tokens = sum(map(len, rollout.completion_ids))
        self.generations.append(
            {"seconds": time.monotonic() - begun, "tokens": tokens, "sequences": len(streams), "end": time.time()}
        )
        self.sampled += zip(streams, map(digest, rollout.prompt_ids, rollout.completion_ids), strict=True)
        return rollout

    def score(self, original, trainer, model, inputs):
        self.trainer = trainer
        if trainer.model.training:
            columns = []
            for name in ("prompt", "completion"):
                mask = inputs[f"{name}_mask"].bool()
                columns.append([row[kept].tolist() for row, kept in zip(inputs[f"{name}_ids"], mask, strict=True)])
            self.trained += [(trainer.state.global_step + 1, digest(*pair)) for pair in zip(*columns, strict=True)]
        return original(trainer, model, inputs)

    # ---- the end

    def write(self, error):
        ahead = self.trainer.ahead if isinstance(self.trainer, AsyncTrainer) else None
        size = self.trainer.num_generations if self.trainer else 1
        asked = self.trainer._sequences_sampled // size if self.trainer else 0
        self.out.write_text(
            json.dumps(
                {
                    "pushes": self.pushes, "copies": self.copies, "generations": self.generations,
                    "sampled": self.sampled, "trained": self.trained, "failed": self.failed, "group": size,
                    "retries": self.engine.retries if self.engine else 0,
                    "restarts": self.engine.restarts if self.engine else 0,
                    "asked": ahead.cursor + ahead.recycled if ahead else asked,
                    "open": len(ahead.engine.buffer) if ahead else asked - len(self.sampled) // size,
                    "stale": ahead.stale if ahead else 0, "error": error,
                }
            )
        )  # fmt: skip


def account(*audits):
    """What became of the groups, over a run or over a run and its resumption -> {asked, trained, stale, open, twice}.

    Each trained sequence is matched with one random stream that gave it. twice: trained sequences without a stream left;
    open: groups asked for that wait in the buffer or were under way. A stream that was sampled again (resumption) counts once.
    """
    size, streams = audits[0]["group"], {}
    for audit in audits:
        for stream, text in audit["sampled"]:
            streams.setdefault(text, set()).add(stream)
    used, twice = set(), 0
    for text in (text for audit in audits for _, text in audit["trained"]):
        free = sorted(streams.get(text, set()) - used)
        used.update(free[:1])
        twice += not free
    return {
        "asked": audits[-1]["asked"],
        "trained": len(used) / size,
        "stale": audits[-1]["stale"],
        "open": audits[-1]["open"],
        "twice": twice,
    }


def _child(out, log, words):
    sys.stdout = sys.stderr = open(log, "w", buffering=1)
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    os.chdir(REPO)
    torch.set_num_threads(1)
    main([str(out), *words])


def start(options, folder, name="audit", **places):
    """The recipe of a command line in a fresh process: a fork would inherit the locks of threads that it has not.
    `places` replaces words of the command line. -> the process, to be given to `result`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    words = [str(places.get(word, word)) for word in shlex.split(options)] + ["--output_dir", str(folder / "run")]
    out, log = folder / f"{name}.json", folder / f"{name}.log"
    process = get_context("spawn").Process(target=_child, args=(out, log, words))
    process.out, process.log = out, log
    process.start()
    return process


def result(process):
    """Waits for the end of the run -> its OUT.json; RuntimeError where it left none."""
    process.join()
    if not process.out.exists():
        raise RuntimeError(process.log.read_text()[-3000:])
    return json.loads(process.out.read_text())


def main(arguments):
    out, recipe, *options = arguments
    audit, error = Audit(out), None
    sys.argv = [recipe, *options]
    try:
        importlib.import_module(Path(recipe).stem).main()
    except (Exception, SystemExit) as raised:
        error = str(raised).removeprefix("error: ")
        raise
    finally:
        audit.write(error)


if __name__ == "__main__":
    main(sys.argv[1:])
