"""A real vLLM server on a free port, started by recipes/serve_vllm.sh, killed and halted as a machine would."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx

REPO = Path(__file__).resolve().parents[1]
START_S = 600  # a busy machine compiles and loads slowly


class RealServer:
    """Context manager. python of the server's environment (requirements-vllm.txt), model folder, log file, vLLM's options."""

    def __init__(self, python, model, log, *options, plugin=True):
        with contextlib.closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{self.port}", log
        self.env = os.environ | {"PYTHON": python, "PORT": str(self.port), "HF_HUB_OFFLINE": "1"}
        if not plugin:
            self.env["VLLM_PLUGINS"] = ""  # none is loaded
        self.command = [str(REPO / "recipes" / "serve_vllm.sh"), str(model), *options]
        self.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def start(self):
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self.command, env=self.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def wait(self):
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended while it started: {self.log.read_text()[-3000:]}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return self
            time.sleep(1.0)
        raise TimeoutError(self.log.read_text()[-3000:])

    def signal(self, number):
        """To every process of the server."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self):
        self.signal(signal.SIGKILL)
        self.process.wait()
