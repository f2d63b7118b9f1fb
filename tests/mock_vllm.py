"""A server with the endpoints of vLLM 0.32 that a rollout engine uses, over a tiny model on the CPU, with faults on order.

Shapes and field names are those of a real answer (`RECORDED`); token ids, log-probs, routes and weight versions are what
a `TransformersEngine` made. `keeps_linear=True` is the documented case of a server whose linear layers keep their old
values while it reports success.
"""

import base64
import contextlib
import io
import json
import socket
import sys
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlparse

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from rollout import TransformersEngine
from routing import routing_shape

RECORDED = {  # an answer of /inference/v1/generate
    "request_id": "generate-tokens-8b1c", "model": "tiny", "created": 1796000000,
    "usage": {"prompt_tokens": 4, "total_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": None},
    "prompt_logprobs": None, "prompt_token_id_logprobs": None, "prompt_token_ids": None, "mm_placeholders": None,
    "metrics": None, "kv_transfer_params": None, "ec_transfer_params": None, "output_mode": "tokens",
    "choices": [
        {
            "index": 0, "finish_reason": "stop", "stop_reason": None, "token_ids": [17, 9, 2],
            "routed_experts": None, "sampling_mask": None,
            "weight_versions": [{"version": "default", "start": 0, "end": 3}],
            "logprobs": {
                "content": [
                    {"token_id": 17, "logprob": -3.98, "rank": 11, "top_logprobs": []},
                    {"token_id": 9, "logprob": -0.25, "rank": 1, "top_logprobs": []},
                    {"token_id": 2, "logprob": -0.5, "rank": 1, "top_logprobs": []},
                ]
            },
        }
    ],
}  # fmt: skip


def npy_base64(array):
    """As vLLM encodes arrays."""
    with io.BytesIO() as buffer:
        np.save(buffer, array, allow_pickle=False)
        return base64.b64encode(buffer.getvalue()).decode("ascii")


class _Aborted(Exception):
    pass


class MockVLLM:
    """Context manager: a server on a loopback port, `.url`.

    masks     record sampling masks, and so refuse requests without top_k, as the real one does
    faults    what happens to the next generate requests, one word each: drop | cut | garbage | 500 | hang | ok
    requests  the paths that came, in order
    """

    def __init__(
        self,
        folder,
        seed=0,
        routes=False,
        masks=False,
        keeps_linear=False,
        logprobs_mode="processed_logprobs",
        **settings,
    ):
        self.folder, self.keeps_linear, self.routes, self.masks = str(folder), keeps_linear, routes, masks
        self.settings = {
            "dev": True,
            "scale_out": True,
            "dtype": "torch.float32",
            "resets": True,
            "pace_s": 0.0,
        } | settings
        self.logprobs_mode, self.seed = logprobs_mode, seed
        self.faults, self.requests, self.bodies, self.port = deque(), [], [], 0
        self.served, self.errors = 0, []
        self.release = threading.Event()  # ends hanging requests

    # ---- life

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()

    def start(self):
        """A new server on the same port, with the weights of its folder."""
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        config = self.model.config
        self.shape = routing_shape(self.model)
        self.engine = TransformersEngine(
            self.model, config.eos_token_id, config.pad_token_id, seed=self.seed, record_routes=self.routes,
            record_support=self.masks,
        )  # fmt: skip
        self.labels, self.aborting, self.running = ["default"], False, 0
        self.sampling, self.turn = threading.Lock(), threading.Lock()  # one generation; one token of it, or a reload
        self.open, self.state, self.sockets = threading.Event(), threading.Condition(), []
        self.open.set()
        self.release.clear()
        mock = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def do_GET(self):
                self.answer({})

            def do_POST(self):
                length = int(self.headers.get("Content-Length", 0))
                self.answer(json.loads(self.rfile.read(length) or b"{}"))

            def answer(self, body):
                address = urlparse(self.path)
                mock.requests.append(address.path)
                query = {k: v[0] for k, v in parse_qs(address.query).items()}
                try:
                    code, content = mock.handle(address.path, query, body)
                except _Aborted:
                    self.close_connection = True
                    return
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data) + (100 if content == b"{" else 0)))
                self.end_headers()
                self.wfile.write(data)
                self.close_connection = content == b"{"

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

            def get_request(self):
                sock, address = super().get_request()
                mock.sockets.append(sock)
                return sock, address

            def handle_error(self, request, client_address):
                mock.errors.append(sys.exception())  # a client that gave up, or a mistake in this file

        self.http = Quiet(("127.0.0.1", self.port), Handler)
        self.port = self.http.server_address[1]
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def kill(self):
        """Nobody answers any more, requests under way break off."""
        self.aborting = True
        self.release.set()
        self.open.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()
        for sock in self.sockets:  # a process that dies takes its connections along
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        with self.state:
            self.state.wait_for(lambda: self.running == 0, 30)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    # ---- endpoints

    def handle(self, path, query, body):
        if path == "/health":
            return 200, b""
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "tiny", "max_model_len": 128}]}
        if path == "/inference/v1/generate":
            return self.generate(body) if self.settings["scale_out"] else (403, {"error": "scale-out is disabled"})
        if path == "/version":
            return 200, {"version": "0.32.0"}
        if not self.settings["dev"]:
            return 404, {"detail": "Not Found"}
        return getattr(self, path.strip("/"))(query, body)

    def server_info(self, query, body):
        model = {
            "model": self.folder, "dtype": self.settings["dtype"], "logprobs_mode": self.logprobs_mode, "quantization": None,
            "return_sampling_mask": self.masks,
        }  # fmt: skip
        return 200, {"vllm_config": {"model_config": model}}

    def weight_info(self, query, body):
        return 200, {"weight_version": self.labels[-1]}

    def pause(self, query, body):
        mode = query["mode"]
        with self.state:
            self.aborting = mode == "abort"
            if mode != "keep":
                self.state.wait_for(lambda: self.running == 0, 30)
            self.open.clear()
            self.aborting = False
        return 200, {"status": "paused"}

    def resume(self, query, body):
        self.open.set()
        return 200, {"status": "resumed"}

    def reset_prefix_cache(self, query, body):
        return 200, {"success": self.settings["resets"] or query["reset_running_requests"] == "true"}

    def update_weight_version(self, query, body):
        self.labels[-1] = body["new_version"]
        return 200, {"success": True, "new_version": body["new_version"]}

    def collective_rpc(self, query, body):
        assert body["method"] == "reload_weights"
        new = AutoModelForCausalLM.from_pretrained(body["kwargs"]["weights_path"], dtype=torch.float32)
        state = new.state_dict()
        if self.keeps_linear:
            kept = {f"{n}.weight" for n, m in self.model.named_modules() if isinstance(m, nn.Linear)}
            state = {k: v for k, v in state.items() if k not in kept or k == "lm_head.weight"}
        with self.turn, torch.no_grad():
            self.model.load_state_dict(state, strict=False)
            self.labels.append(self.labels[-1])
            self.engine.push_weights(self.model, len(self.labels) - 1)
        return 200, {"results": [None]}

    # ---- sampling

    def generate(self, body):
        self.bodies.append(body)
        if self.masks and not body["sampling_params"].get("top_k", 0) > 0:
            return 400, {"error": {"message": "sampling distribution replay requires top_k > 0"}}
        scoring = body["sampling_params"].get("prompt_logprobs") is not None
        fault = self.faults.popleft() if self.faults and not scoring else "ok"
        if fault == "drop":
            raise _Aborted
        if fault == "500":
            return 500, {"error": {"message": "EngineDeadError"}}
        if fault == "garbage":
            return 200, b"<html>not a server</html>"
        if fault == "hang":
            self.release.wait(30)
            raise _Aborted
        self.open.wait(30)
        with self.state:
            self.running += 1
        try:
            answer = self.sample(body["token_ids"], dict(body["sampling_params"]))
        finally:
            with self.state:
                self.running -= 1
                self.state.notify_all()
        if fault == "cut":
            return 200, b"{"
        self.served += 1
        return 200, answer

    def between_tokens(self):
        self.turn.release()
        if self.settings["pace_s"]:
            time.sleep(self.settings["pace_s"])
        self.open.wait(30)
        self.turn.acquire()
        if self.aborting:
            raise _Aborted

    def sample(self, prompt, sampling):
        n, limit = sampling.get("n", 1), sampling["max_tokens"]
        seeds = [sampling.get("seed", 0) + i for i in range(n)]
        choices = []
        with self.sampling, self.turn:
            scores = self.score(prompt) if sampling.get("prompt_logprobs") is not None else None
            try:
                made = self.engine.generate(
                    [prompt] * n, limit, sequence_ids=seeds, temperature=sampling.get("temperature", 1.0),
                    **{name: sampling[name] for name in ("top_k", "top_p", "min_p") if name in sampling},
                    between_tokens=self.between_tokens,
                )  # fmt: skip
            except _Aborted:
                made = None
        for i in range(n):
            if made is None:
                choices.append(
                    RECORDED["choices"][0] | {"index": i, "finish_reason": "abort", "token_ids": [], "logprobs": None}
                )
                continue
            ids, versions = made.completion_ids[i], made.token_versions[i]
            spans = []
            for place, version in enumerate(versions):
                if not spans or spans[-1]["version"] != self.labels[version]:
                    spans.append({"version": self.labels[version], "start": place, "end": place})
                spans[-1]["end"] = place + 1
            content = [
                {"token_id": token, "logprob": logp, "rank": 1, "top_logprobs": []}
                for token, logp in zip(ids, made.rollout_logps[i], strict=True)
            ]
            choices.append(
                RECORDED["choices"][0] | {
                    "index": i, "token_ids": ids, "finish_reason": "stop" if made.finished[i] else "length",
                    "weight_versions": spans, "logprobs": {"content": content},
                    "routed_experts": npy_base64(made.routes[i].numpy()) if self.routes else None,
                    "sampling_mask": self.mask_rows(*made.support[i]) if self.masks else None,
                }
            )  # fmt: skip
        choices.reverse()  # the order is not promised, the index is
        return RECORDED | {"choices": choices, "prompt_logprobs": scores}

    @staticmethod
    def mask_rows(ids, offsets):
        return [ids[start:end].tolist() for start, end in zip(offsets[:-1], offsets[1:], strict=True)]

    @torch.no_grad()
    def score(self, prompt):
        logps = self.engine.model(input_ids=torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        return [None] + [
            {str(token): {"logprob": logps[i, token].item(), "rank": 1, "decoded_token": None}}
            for i, token in enumerate(prompt[1:])
        ]
