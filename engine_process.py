"""A rollout engine in a process of its own: `TransformersEngine` that samples while the trainer trains.

`EngineProcess` offers what every engine of `rollout` offers and shares nothing with the process that made it: weights
travel as bytes through a pipe, rollouts come back through another. Generation and push may come from two threads, so
that weights can arrive in the middle of a generation.

This file is also what the other process runs; it imports no trainer, which is most of the start-up time.
"""

import io
import json
import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch

from rollout import Rollout, TransformersEngine, Weights, _Source, copy_weights

ON_PUSH = ("finish", "continue", "restart")
STOP_S = 5.0  # seconds between asking the process to end and ending it


def send_weights(connection: Connection, weights: Weights, version: int) -> None:
    """Each distinct tensor once, as bytes: tied weights stay tied, and no message is pickled at the size of a model."""
    tensors = list({id(source.tensor): source.tensor for source in weights.sources}.values())
    place = {id(tensor): i for i, tensor in enumerate(tensors)}
    names = [(source.name, place[id(source.tensor)]) for source in weights.sources]
    shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    connection.send((version, names, shapes, weights.model_class, weights.config))
    for tensor in tensors:
        if tensor.numel():
            connection.send_bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def receive_weights(connection: Connection) -> tuple[Weights, int]:
    """What `send_weights` sent, in memory of this process."""
    version, names, shapes, model_class, config = connection.recv()
    tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
    for tensor in tensors:
        if tensor.numel():
            connection.recv_bytes_into(tensor.reshape(-1).view(torch.uint8).numpy())
    return Weights([_Source(name, tensors[i]) for name, i in names], model_class, config), version


class EngineProcess:
    """`TransformersEngine` with the same arguments and results, in a process of its own.

    on_push  what a push does to a generation that is under way:
             finish    it ends with the weights that it began with; the push waits for it
             continue  the next token is sampled by the new weights, over the keys and values of the old ones;
                       `Rollout.token_versions` tells which token is whose
             restart   it begins again with the new weights and the same random streams
    threads  of the process; default: as many as this one uses, which makes sums round as they do here

    Raises ValueError where `TransformersEngine` does, and RuntimeError once the process is gone.
    """

    def __init__(
        self,
        model: torch.nn.Module | Weights,
        eos_token_ids: int | Sequence[int],
        pad_token_id: int,
        rollout_dtype: str = "float32",
        seed: int = 0,
        device: torch.device | str | None = None,
        record_routes: bool = False,
        record_support: bool = False,
        threads: int | None = None,
        on_push: str = "finish",
    ):
        if on_push not in ON_PUSH:
            raise ValueError(f"on_push is {on_push!r}: choose one of {', '.join(ON_PUSH)}")
        weights = model if isinstance(model, Weights) else copy_weights(model)
        self._control, control = Pipe()
        self._pushes, pushes = Pipe()
        fds = [control.fileno(), pushes.fileno()]
        self._process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), json.dumps([os.getpid(), *fds])],
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            start_new_session=True,  # Ctrl-C reaches the parent alone, which then stops us
        )
        control.close()
        pushes.close()
        self._generating, self._pushing = threading.Lock(), threading.Lock()
        settings = {
            "eos_token_ids": eos_token_ids,
            "pad_token_id": pad_token_id,
            "rollout_dtype": rollout_dtype,
            "seed": seed,
            "device": None if device is None else str(device),
            "record_routes": record_routes,
            "record_support": record_support,
        }
        self.version, self.fingerprint = 0, ""
        try:
            self._send(self._control, (settings, threads or torch.get_num_threads(), on_push))
            self._send_weights(weights, 0)
            self.fingerprint = self._answer(self._control)
        except BaseException:
            self.close()
            raise

    copy_weights = staticmethod(copy_weights)

    def push_weights(self, model: torch.nn.Module | Weights, version: int) -> str:
        """As `TransformersEngine.push_weights`; returns when the weights are in use."""
        weights = model if isinstance(model, Weights) else copy_weights(model)
        with self._pushing:
            self._send_weights(weights, version)
            self.fingerprint = self._answer(self._pushes)
            self.version = int(version)
        return self.fingerprint

    def generate(self, prompt_ids: Sequence[Sequence[int]], max_new_tokens: int, **options: Any) -> Rollout:
        """As `TransformersEngine.generate`, without its callbacks."""
        if isinstance(options.get("sequence_ids"), range):
            options["sequence_ids"] = list(options["sequence_ids"])
        return self._ask("generate", prompt_ids, max_new_tokens, options)

    def describe(self) -> dict[str, Any]:
        """As `TransformersEngine.describe`."""
        return self._ask("describe")

    def state_dict(self) -> dict[str, Any]:
        """As `TransformersEngine.state_dict`."""
        return self._ask("state_dict")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `TransformersEngine.load_state_dict`."""
        self._ask("load_state_dict", state)
        self.version = state["version"]

    def _ask(self, *message: Any) -> Any:
        with self._generating:
            self._send(self._control, message)
            return self._answer(self._control)

    def close(self) -> None:
        """Ends the process, whatever it is doing, and waits for its end. May be called twice, and from any thread."""
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, connection: Connection, message: Any) -> None:
        try:
            connection.send(message)
        except (BrokenPipeError, ConnectionError) as error:
            raise self._gone() from error

    def _send_weights(self, weights: Weights, version: int) -> None:
        try:
            send_weights(self._pushes, weights, version)
        except (BrokenPipeError, ConnectionError) as error:
            raise self._gone() from error

    def _answer(self, connection: Connection) -> Any:
        try:
            done, value = connection.recv()
        except (EOFError, ConnectionError) as error:
            raise self._gone() from error
        if not done:
            raise value
        return value

    def _gone(self) -> RuntimeError:
        code = self._process.wait()
        return RuntimeError(
            f"the rollout engine's process ended (exit status {code}), its error, if any, is above: resume from the last "
            "checkpoint; -9 is usually the system, short of memory"
        )


# ---------------------------------------------------------------- the other process


class _Restart(Exception):
    """Weights arrived: begin the generation again."""


class _Worker:
    """Answers what `EngineProcess` asks: rollouts on one connection, weights on the other."""

    def __init__(self, control: Connection, pushes: Connection):
        self.control, self.pushes = control, pushes
        settings, threads, self.on_push = control.recv()
        torch.set_num_threads(threads)
        weights, version = receive_weights(pushes)
        self.engine = None
        self.reply(control, lambda: self.start(weights, settings))

    def start(self, weights: Weights, settings: dict) -> str:
        self.engine = TransformersEngine(weights, **settings)
        return self.engine.fingerprint

    def run(self) -> None:
        while self.engine is not None:
            ready = wait([self.control, self.pushes])
            if self.pushes in ready:  # first: a generation that was asked for later shall have them
                self.push()
            elif self.control in ready:
                kind, *arguments = self.control.recv()
                self.reply(self.control, lambda kind=kind, arguments=arguments: getattr(self, kind)(*arguments))

    def push(self) -> None:
        weights, version = receive_weights(self.pushes)
        self.reply(self.pushes, lambda: self.engine.push_weights(weights, version))

    def generate(self, prompt_ids: list, max_new_tokens: int, options: dict) -> Rollout:
        between = {"finish": None, "continue": self.push_pending, "restart": self.push_pending_and_restart}
        while True:
            try:
                return self.engine.generate(
                    prompt_ids, max_new_tokens, between_tokens=between[self.on_push], **options
                )
            except _Restart:
                continue

    def push_pending(self) -> bool:
        pending = self.pushes.poll()
        if pending:
            self.push()
        return pending

    def push_pending_and_restart(self) -> None:
        if self.push_pending():
            raise _Restart

    def describe(self) -> dict:
        return self.engine.describe()

    def state_dict(self) -> dict:
        return self.engine.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self.engine.load_state_dict(state)

    @staticmethod
    def reply(connection: Connection, work: Callable[[], Any]) -> None:
        try:
            answer = True, work()
        except ValueError as error:
            answer = False, ValueError(str(error))
        except Exception as error:
            traceback.print_exc()
            answer = False, RuntimeError(f"the rollout engine failed with {type(error).__name__}: {error}")
        with io.BytesIO() as buffer:
            _Pickler(buffer).dump(answer)
            connection.send_bytes(buffer.getbuffer())


class _Pickler(pickle.Pickler):
    """Tensors travel as numpy arrays. torch's own way through a pipe hands them over as open files, which a process has a limited
    number of; plain pickle takes ten times as long for the many small ones of a rollout."""

    def reducer_override(self, value: Any) -> Any:
        return (torch.from_numpy, (value.numpy(),)) if isinstance(value, torch.Tensor) else NotImplemented


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def _main() -> None:
    parent, control, pushes = json.loads(sys.argv[1])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        _Worker(Connection(control), Connection(pushes)).run()
    except (EOFError, ConnectionError):
        pass  # the parent ended, or closed the engine


if __name__ == "__main__":
    _main()
