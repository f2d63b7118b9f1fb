"""vLLM as a rollout engine: token ids in, token ids out over HTTP, weights pushed and the push proved.

The server lives in its own environment, `recipes/serve_vllm.sh` starts it. Three things are never taken on trust:

- What it can do. `VLLMEngine` asks before training starts and names everything that is missing in one error.
- What it answers. Every choice is decoded and checked (`wire_formats`); what does not fit is asked for again, then an error.
- That a push arrived. A server may report success, carry the new version label and still compute with old weights: the
  CPU build packs its linear layers at load and keeps the packed ones. So a fixed probe prompt is scored by both sides
  after every push, and the server's log-probs must be those of the new weights. Before the first step the same is done with
  weights that are 1.25 times too large everywhere, which shows a layer that does not follow at any later step size.

A server that dies is waited for; when it is back it holds its first weights, so the newest ones are pushed again and the
requests that were lost are sent again. A completion is used once, whatever was retried.
"""

import contextlib
import hashlib
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file
from torch import nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights

from rollout import Rollout, Weights, copy_weights, fingerprint_of, unwrap
from routing import moe_layer_numbers, routing_shape
from wire_formats import (
    RouteDecoder,
    WireError,
    prompt_logps,
    sampled_tokens,
    sampling_support,
    token_versions,
    vllm_route_decoder,
)

# What precision alone explains of the mean |log-prob difference| of a scored prompt, by the server's dtype: so many nats, or that
# part of what the push itself moves. Measured on CPUs: float32 5e-6; bfloat16 0.09 of SmolLM2-135M, 0.16 where the canary moves the
# probe by 3.6; 8-bit weights 0.17. Linear layers that do not follow the canary leave 0.18 to 1.1 of its move.
PRECISION_GAP = {"float32": (1e-3, 0.0), "bfloat16": (0.1, 0.1), "float16": (0.1, 0.1)}
QUANTIZED_GAP = 0.5, 0.15
FLOOR = 3.0  # later gaps up to this multiple of the first true push's, which the canary has proved to be precision
CANARY = 1.25  # factor on every matrix in the first, false push
PROBE_TOKENS = 48
PAUSE = {"finish": "wait", "continue": "keep", "restart": "abort"}  # --on_push -> what the server does with requests
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 10.0  # between two attempts, doubling, each times a random factor in [0.5, 1.5]


class ServerGone(RuntimeError):
    """Nobody answers, or an answer broke off."""


class ServerBusy(RuntimeError):
    """The server answers that it cannot now (429, 5xx): ask again."""


class Aborted(ServerBusy):
    """A push ended the request, as --on_push restart asks for: it is sent again, however often."""


class StaleServer(RuntimeError):
    """The server samples with weights that were not pushed by us: it was restarted."""


@dataclass
class ScoredWeights:
    """A copy of weights with what proves their arrival.

    weights      None on a process that only follows another one's push
    fingerprint  as `TransformersEngine.push_weights` gives it
    probe        log-probs of the probe prompt in the training engine, (PROBE_TOKENS - 1,)
    """

    weights: Weights | None
    fingerprint: str
    probe: list[float]


# ---------------------------------------------------------------- HTTP


class Server:
    """The endpoints of one vLLM server, with timeouts; errors become the three kinds above, or ValueError."""

    def __init__(self, url: str, timeout_s: float, connections: int):
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        key = os.environ.get("VLLM_API_KEY")
        self.http = httpx.Client(
            base_url=self.url,
            timeout=httpx.Timeout(timeout_s, connect=5.0, pool=None),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            trust_env=False,  # a proxy of the environment is for the outside, not for a server beside us
        )

    def call(self, method: str, path: str, timeout_s: float | None = None, **options: Any) -> Any:
        """-> the answer's JSON, None for an empty one."""
        if timeout_s is not None:
            options["timeout"] = httpx.Timeout(timeout_s, connect=5.0, pool=None)
        try:
            answer = self.http.request(method, path, **options)
        except httpx.TransportError as error:
            raise ServerGone(f"{self.url}{path}: {type(error).__name__} {error}".strip()) from error
        if answer.status_code == 429 or answer.status_code >= 500:
            raise ServerBusy(f"{self.url}{path} answers {answer.status_code}: {answer.text[:300]}")
        if answer.status_code >= 400:
            raise ValueError(f"{self.url}{path} answers {answer.status_code}: {answer.text[:300]}")
        if not answer.content:
            return None
        try:
            return answer.json()
        except ValueError as error:
            raise WireError(f"{self.url}{path} answers no JSON: {answer.text[:100]!r}") from error

    def get(self, path: str, **options: Any) -> Any:
        """See `call`."""
        return self.call("GET", path, **options)

    def post(self, path: str, **options: Any) -> Any:
        """See `call`."""
        return self.call("POST", path, **options)

    def alive(self) -> bool:
        """Does it answer within five seconds?"""
        try:
            self.get("/health", timeout_s=5.0)
        except (ServerGone, ServerBusy):
            return False
        return True

    def label(self) -> str:
        """The weight version that it says it has."""
        return self.get("/weight_info")["weight_version"]


# ---------------------------------------------------------------- ways of carrying weights


def checkpoint_tensors(weights: Weights) -> dict[str, torch.Tensor]:
    """Names and tensors as a checkpoint on disk has them: what a server loads. (transformers trains the experts of a MoE
    as a stack and saves them one by one.) A tied head is left out."""
    with no_init_weights(), torch.device("meta"):
        skeleton = weights.model_class(weights.config)
    named: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for source in weights.sources:
        if id(source.tensor) not in seen:
            named[source.name] = source.tensor
            seen.add(id(source.tensor))
    return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(skeleton, named).items()}


class DiskTransfer:
    """Weights through a folder that trainer and server both see. The newest stays for a server that comes back."""

    def __init__(self, server: Server, folder: str | Path):
        self.server, self.folder = server, Path(folder).absolute()

    def send(self, weights: Weights, label: str) -> None:
        """Writes a whole checkpoint, then has the server load it. The one before is deleted."""
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self.folder / f"weights-{label}"
        shutil.rmtree(target, ignore_errors=True)
        partial = self.folder / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        save_file(checkpoint_tensors(weights), partial / "model.safetensors", metadata={"format": "pt"})
        weights.config.save_pretrained(partial)
        partial.rename(target)  # a folder of this name is complete
        for old in self.folder.glob("weights-*"):
            if old != target:
                shutil.rmtree(old)
        self.load(target)

    def load(self, target: Path) -> None:
        """Has the server load a checkpoint folder."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(target)}}
        self.server.post("/collective_rpc", json=body)


class NCCLTransfer:
    """Weights through NCCL, by TRL's `WeightTransferClient`: trainer and server on GPUs, vLLM installed beside TRL."""

    def __init__(self, server: Server, device: torch.device):
        self.server, self.device, self.client = server, device, None

    def send(self, weights: Weights, label: str) -> None:
        """Broadcasts every tensor; the first call joins the group."""
        # Here, as it looks for vllm, which is installed beside TRL on GPU machines only.
        from trl.experimental.async_grpo.weight_transfer import WeightTransferClient

        tensors = checkpoint_tensors(weights)
        if self.client is None:
            update = {
                "names": list(tensors),
                "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
                "shapes": [list(tensor.shape) for tensor in tensors.values()],
            }
            self.client = WeightTransferClient(_TRLView(self.server), update)
            self.client.init_weight_transfer()
        self.client.send_weights((name, tensor.to(self.device)) for name, tensor in tensors.items())

    def close(self) -> None:
        """Leaves the group."""
        if self.client is not None:
            self.client.destroy()


class _TRLView:
    """What TRL's transfer client asks of a server, over our connection."""

    def __init__(self, server: Server):
        self.server, self.server_url = server, server.url

    def wait_for_server_ready(self) -> None:
        self.server.get("/health")

    def get_dtype(self) -> str:
        return self.server.get("/server_info?config_format=json")["vllm_config"]["model_config"]["dtype"]

    def get_world_size(self) -> int:
        return self.server.get("/get_world_size")["world_size"]

    def init_weight_transfer_engine(self, init_info: dict, timeout: float) -> None:
        self.server.post("/init_weight_transfer_engine", json={"init_info": init_info}, timeout_s=timeout)

    def start_weight_update(self, timeout: float) -> None:
        self.server.post("/start_weight_update", json={"is_checkpoint_format": True}, timeout_s=timeout)

    def update_weights(self, update_info: dict, timeout: float) -> None:
        self.server.post("/update_weights", json={"update_info": update_info}, timeout_s=timeout)

    def finish_weight_update(self, timeout: float) -> None:
        self.server.post("/finish_weight_update", timeout_s=timeout)


# ---------------------------------------------------------------- the engine


class VLLMEngine:
    """A vLLM server behind the interface of every rollout engine.

    model           the training model, for the first push, the shape of its routes and the probe
    url             of the server, for example http://127.0.0.1:8000; a key comes from VLLM_API_KEY
    eos_token_ids   one id or several; any of them ends a sequence
    folder          where weights are written for the server (disk transfer)
    transfer        disk | nccl
    seed            of the requests' seeds; a server repeats its samples only as far as its kernels do
    concurrency     requests under way at once; more of them wait here, not in the server
    needs_routes, needs_support    refuse a server that records no routes, no sampling masks
    on_push         what a push does to requests under way: finish | continue | restart, see `EngineProcess`
    pushes          False on every process but one: the others wait until the server has the version
    timeout_s       of one request, the generation included
    restart_s       how long a server that died is waited for
    attempts        tries of one request that fails in another way; where half of the answers are lost, 12 fail once in 4,096
    tolerance       of the probe, mean |log-prob difference|; None: by the server's precision, as its first weights show it
    route_decoder   of another server's format, see `wire_formats`

    Raises ValueError naming everything that the server lacks, and RuntimeError when a push does not arrive.
    """

    def __init__(
        self,
        model: nn.Module,
        url: str,
        eos_token_ids: int | Sequence[int],
        folder: str | Path,
        transfer: str = "disk",
        seed: int = 0,
        concurrency: int = 32,
        needs_routes: bool = False,
        needs_support: bool = False,
        on_push: str = "finish",
        pushes: bool = True,
        timeout_s: float = 600.0,
        restart_s: float = 300.0,
        attempts: int = 12,
        tolerance: float | None = None,
        route_decoder: RouteDecoder | None = None,
    ):
        self.server = Server(url, timeout_s, concurrency + 2)
        self.eos = [eos_token_ids] if isinstance(eos_token_ids, int) else sorted(set(eos_token_ids))
        self.seed, self.on_push, self.pushes = seed, on_push, pushes
        self.restart_s, self.attempts = restart_s, attempts
        self.tolerance, self.share = tolerance, 0.0
        self._gap = 0.0  # of the newest push, as proved
        plain = unwrap(model)
        self.vocabulary = plain.config.get_text_config().vocab_size
        self.needs_routes, self.needs_support = needs_routes, needs_support
        self.decode_routes = route_decoder
        shape = routing_shape(plain)
        if shape is not None and route_decoder is None:
            layers = plain.config.get_text_config().num_hidden_layers
            self.decode_routes = vllm_route_decoder(shape, moe_layer_numbers(plain), layers)
        generator = torch.Generator().manual_seed(0)
        # A fixed prompt over the whole vocabulary: every embedding row may take part, and no cache holds it beforehand.
        self.probe_ids = torch.randint(self.vocabulary, (PROBE_TOKENS,), generator=generator).tolist()
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="vllm")
        self._reviving, self._sampled = threading.RLock(), 0
        self._probe_before: list[float] | None = None  # the training engine's scores at the last push
        self._pushed: tuple[ScoredWeights, int] | None = None
        self.version, self.fingerprint, self.closed = 0, "", False
        self.restarts = self.retries = 0
        self._settings: dict[str, float] = {}  # of the last generation, as sent
        self.max_tokens = self.check()
        self.transfer = NCCLTransfer(self.server, next(plain.parameters()).device) if transfer == "nccl" else None
        if transfer == "disk":
            self.transfer = DiskTransfer(self.server, folder)
        if self.transfer is None:
            raise ValueError(f"transfer is {transfer!r}: choose disk or nccl")
        with _scaled(plain, CANARY):
            canary = self.copy_weights(model)
        first = self.copy_weights(model)
        if pushes:
            self._probe_before = first.probe
            self._attempt(lambda: self._push(canary, "canary"), "pushing weights", revive=False)
            self._probe_before = canary.probe
        self.push_weights(first, 0)
        if pushes and tolerance is None:
            self.tolerance = max(self.tolerance, FLOOR * self._gap)

    # ---- what the server can do

    def check(self) -> int:
        """Raises ValueError naming everything that the server lacks. -> tokens that a sequence may have."""
        lacks, flags = [], []
        try:
            limit = self.server.get("/v1/models")["data"][0]["max_model_len"]
        except (ServerGone, ServerBusy) as error:
            raise ValueError(
                f"no vLLM server answers ({error}): start one with recipes/serve_vllm.sh, or name it with --vllm_server_base_url"
            ) from error
        config = {}
        try:
            config = self.server.get("/server_info?config_format=json")["vllm_config"]
        except ValueError:
            lacks.append("it takes no weights")
            flags.append("VLLM_SERVER_DEV_MODE=1")
        model = config.get("model_config", {})
        if config and model.get("logprobs_mode") != "processed_logprobs":
            lacks.append(
                f"its log-probs are {model.get('logprobs_mode')}, those of the sampled distribution are needed"
            )
            flags.append("--logprobs-mode processed_logprobs")
        if self.tolerance is None:
            dtype = str(model.get("dtype")).removeprefix("torch.")
            gaps = QUANTIZED_GAP if model.get("quantization") else PRECISION_GAP.get(dtype, QUANTIZED_GAP)
            self.tolerance, self.share = gaps
        if model.get("return_sampling_mask") and not self.needs_support:
            raise ValueError(
                f"the vLLM server at {self.server.url} records sampling masks and so refuses requests without a bounded top_k: start "
                "it without --return-sampling-mask, or train with --keep_sampling_mask"
            )
        if config and self.pushes:
            # a run that was killed in a push has left it paused: requests would wait for ever
            self.server.post("/resume")
        # top_k: a server that records sampling masks takes no request without
        body = {"token_ids": self.probe_ids[:4], "sampling_params": {"max_tokens": 1, "logprobs": 0, "top_k": 1}}
        try:
            choice = self.server.post("/inference/v1/generate", json=body)["choices"][0]
        except ValueError as error:
            if isinstance(error, WireError):
                raise
            lacks.append("it takes no token ids")
            flags.append("--enable-scale-out")
            choice = {}
        if self.needs_routes and choice.get("routed_experts") is None:
            lacks.append("it records no routes for --routing_replay r3")
            flags.append("--enable-return-routed-experts (a GPU build)")
        if self.needs_support and choice.get("sampling_mask") is None:
            lacks.append("it records no sampling masks")
            flags.append("--return-sampling-mask (a GPU build)")
        if lacks:
            raise ValueError(
                f"the vLLM server at {self.server.url} cannot serve this recipe, {'; '.join(lacks)}: start it with "
                f"{' '.join(flags)} (recipes/serve_vllm.sh does)"
            )
        if self.needs_routes:
            self.decode_routes(choice, 5)
        return limit

    # ---- weights

    def copy_weights(self, model: nn.Module) -> ScoredWeights:
        """The weights and the training engine's score of the probe. A collective call where weights are sharded."""
        probe = self._score(model)
        weights = copy_weights(model)
        fingerprint = fingerprint_of(weights.sources)
        return ScoredWeights(weights if self.pushes else None, fingerprint, probe)

    @torch.no_grad()
    def _score(self, model: nn.Module) -> list[float]:
        device = next(model.parameters()).device
        ids = torch.tensor([self.probe_ids], device=device)
        training = model.training
        model.eval()
        with torch.autocast(device.type, enabled=False):
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()  # (S - 1, V)
        model.train(training)
        return logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1).tolist()

    def push_weights(self, model: nn.Module | ScoredWeights, version: int) -> str:
        """Puts the weights into the server and proves it. -> their fingerprint.

        Raises RuntimeError when the server reports success and computes with other weights.
        """
        weights = model if isinstance(model, ScoredWeights) else self.copy_weights(model)
        with self._reviving:
            if self.pushes:
                self._attempt(lambda: self._push(weights, str(int(version))), "pushing weights", revive=False)
                self._pushed = weights, int(version)
            else:
                self._follow(str(int(version)))
            self._probe_before = weights.probe
            self.version, self.fingerprint = int(version), weights.fingerprint
        return self.fingerprint

    def _push(self, weights: ScoredWeights, label: str) -> None:
        if not self.server.alive():
            self._wait_for_server()
        self.server.post(f"/pause?mode={PAUSE[self.on_push]}")
        try:
            self.transfer.send(weights.weights, label)
            for running in ("false", "true"):  # true sends requests that were kept back to their prompts
                if self.server.post(f"/reset_prefix_cache?reset_running_requests={running}")["success"]:
                    break
            else:
                raise RuntimeError(
                    f"the server at {self.server.url} did not reset its prefix cache: samples would start from old keys and values"
                )
            self.server.post("/update_weight_version", json={"new_version": label})
        finally:
            # Not on our connections: `close` may have ended them, and a server that stays paused answers nobody after us.
            apart = Server(self.server.url, self.server.timeout_s, 1)
            with apart.http:
                apart.post("/resume")
        self._prove(weights.probe, label)

    def _follow(self, label: str) -> None:
        """Another process pushes; wait until the server has it."""
        deadline = time.monotonic() + self.restart_s + self.server.timeout_s
        while not self.closed:
            try:
                if self.server.label() == label:
                    return
            except (ServerGone, ServerBusy):
                pass  # the process that pushes waits for the server too
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the server at {self.server.url} never got weight version {label} from the first process"
                )
            time.sleep(0.05)

    def _prove(self, new: list[float], label: str) -> None:
        """The server's score of the probe must be that of the new weights. A server that stays behind by less than the
        precision is caught when what it misses has added up."""
        served = self.score_probe()
        gap, old, allowed, beside = _distance(served, new), self._probe_before, self.tolerance, ""
        if old is not None:
            moved = _distance(new, old)
            allowed = max(allowed, self.share * moved)
            beside = f", from the old ones by {_distance(served, old):.3g} (old and new differ by {moved:.3g})"
        if gap <= allowed:
            self._gap = gap
            return
        raise RuntimeError(
            f"weights {label} were pushed to {self.server.url}, it reports success, but its log-probs of the probe differ from the new "
            f"weights' by {gap:.3g} (allowed: {allowed:.3g}){beside}: some layers keep old values, or it serves another model; "
            "a CPU server needs recipes/serve_vllm.sh, which keeps its linear layers loadable"
        )

    def score_probe(self) -> list[float]:
        """The server's log-probs of the probe prompt, (PROBE_TOKENS - 1,)."""
        body = {
            "token_ids": self.probe_ids,
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "prompt_logprobs": 0},
        }
        return prompt_logps(self.server.post("/inference/v1/generate", json=body), self.probe_ids)

    # ---- a server that fails

    def _attempt(self, work: Callable[[], Any], what: str, revive: bool = True) -> Any:
        """work(), again after a pause when the server is busy, breaks off or answers wrongly; the last error otherwise."""
        attempt, gone = 0, False
        while True:
            try:
                if gone:
                    self._revive()
                return work()
            except (ServerGone, ServerBusy, StaleServer, WireError) as error:
                if self.closed:
                    raise RuntimeError("the rollout engine is closed") from error
                attempt += not isinstance(error, Aborted)
                if attempt == self.attempts:
                    raise RuntimeError(
                        f"{what} failed {self.attempts} times with the vLLM server at {self.server.url}, at last: {error}"
                    ) from error
                self.retries += 1
                time.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt) * random.uniform(0.5, 1.5))
                gone = revive and not isinstance(error, Aborted | WireError)

    def _revive(self) -> None:
        """Waits for the server and gives it the newest weights, unless it has them."""
        with self._reviving:
            self._wait_for_server()
            weights, version = self._pushed or (None, self.version)
            if self.server.label() == str(version):
                return
            self.restarts += 1
            if weights is None:
                self._follow(str(version))
                return
            before, self._probe_before = self._probe_before, None  # it holds its first weights: no old ones of ours
            try:
                self._push(weights, str(version))
            finally:
                self._probe_before = before

    def _wait_for_server(self) -> None:
        deadline = time.monotonic() + self.restart_s
        while not self.server.alive():
            if self.closed or time.monotonic() > deadline:
                raise RuntimeError(
                    f"the vLLM server at {self.server.url} is gone and did not come back within {self.restart_s:.0f} s: start it "
                    "again and resume from the last checkpoint"
                )
            time.sleep(0.2)

    # ---- sampling

    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        batch_size: int | None = None,
        sequence_ids: Sequence[int] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Rollout:
        """One completion for each prompt; equal prompts in a row are one request. As `TransformersEngine.generate`, except
        that `batch_size` is the server's business. May be called from several threads."""
        prompts = [list(prompt) for prompt in prompt_ids]
        if not prompts or not all(prompts):
            raise ValueError("prompt_ids needs at least one prompt, and each at least one token")
        longest = max(map(len, prompts))
        if longest + max_new_tokens > self.max_tokens:
            raise ValueError(
                f"a prompt of {longest} tokens and {max_new_tokens} new ones pass the server's {self.max_tokens}: raise its "
                "--max-model-len, or lower --max_completion_length"
            )
        if self.needs_support and top_k < 1:
            raise ValueError(
                f"top_k is {top_k}: a server that records sampling masks needs a bound on the tokens of a mask, give top_k above 0"
            )
        if sequence_ids is None:
            sequence_ids = range(self._sampled, self._sampled + len(prompts))
            self._sampled += len(prompts)
        self._settings = {
            "temperature": float(temperature),
            "top_p": float(top_p),
            "top_k": top_k,
            "min_p": float(min_p),
        }
        sampling = {
            "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "max_tokens": max_new_tokens,
            "logprobs": 0, "stop_token_ids": self.eos, "detokenize": False,
        }  # fmt: skip
        groups, start = [], 0
        for prompt, same in groupby(prompts):
            n = len(list(same))
            groups.append((prompt, n, self._request_seed(sequence_ids[start])))
            start += n
        done = 0
        answers = []
        futures = [self._pool.submit(self._sample, *group, sampling) for group in groups]
        try:
            for future in futures:
                answers.append(future.result())
                done += len(answers[-1])
                if on_progress:
                    on_progress(done, len(prompts))
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        return self._rollout([part for answer in answers for part in answer])

    def _request_seed(self, sequence: int) -> int:
        digest = hashlib.blake2b(f"{self.seed} {sequence}".encode(), digest_size=4).digest()
        return int.from_bytes(digest) >> 1

    def _sample(self, prompt: list[int], n: int, seed: int, sampling: dict[str, Any]) -> list[dict[str, Any]]:
        """n completions of one prompt, decoded: keyword arguments of a Rollout of one sequence each."""

        def once():
            version = self.version
            body = {"token_ids": prompt, "sampling_params": {**sampling, "n": n, "seed": seed}}
            choices = self.server.post("/inference/v1/generate", json=body).get("choices")
            if not isinstance(choices, list) or len(choices) != n:
                raise WireError(
                    f"{len(choices) if isinstance(choices, list) else 'no'} choices came, {n} were asked for"
                )
            if any(choice.get("finish_reason") == "abort" for choice in choices):
                raise Aborted("a push aborted the request")
            choices.sort(key=lambda choice: choice["index"])
            return [self._decode(prompt, choice, sampling["max_tokens"], version) for choice in choices]

        return self._attempt(once, "sampling")

    def _decode(self, prompt: list[int], choice: dict[str, Any], limit: int, version: int) -> dict[str, Any]:
        ids, logps, finished = sampled_tokens(choice, limit, self.vocabulary)
        if finished and ids[-1] not in self.eos:
            raise WireError(
                f"a sequence ended at token {ids[-1]}, which is none of the ends {self.eos}: the server stops at other tokens"
            )
        ended = next((token for token in ids[:-1] if token in self.eos), None)
        if ended is not None:  # nothing after it belongs to the answer, and all of it would be trained on
            raise WireError(
                f"a sequence goes on after its end, token {ended}: the server does not read stop_token_ids"
            )
        labels = token_versions(choice, len(ids))
        versions = None
        if labels is not None:
            foreign = [label for label in labels if not label.isdecimal()]
            if foreign:
                raise StaleServer(f"tokens were sampled by weights {foreign[0]!r}, which nobody pushed")
            versions = [int(label) for label in labels]
        routes = None
        if self.decode_routes is not None and (self.needs_routes or choice.get("routed_experts") is not None):
            routes = self.decode_routes(choice, len(prompt) + len(ids))
        support = None
        if self.needs_support:
            support = sampling_support(choice, ids, self.vocabulary)
        return {
            "prompt_ids": prompt, "completion_ids": ids, "rollout_logps": logps, "finished": finished,
            "version": version if versions is None else min(versions), "token_versions": versions, "routes": routes,
            "support": support,
        }  # fmt: skip

    def _rollout(self, parts: list[dict[str, Any]]) -> Rollout:
        columns = {name: [part[name] for part in parts] for name in parts[0]}
        for name in ("routes", "support", "token_versions"):
            if any(value is None for value in columns[name]):
                columns[name] = None
        return Rollout(**columns)

    def describe(self) -> dict[str, Any]:
        """What this side goes by, under the names of `TransformersEngine.describe`: what the server tells of itself, and what it was
        sent with the last request (sampling settings, ends of a sequence). Of the model it tells a name and no type, vocabulary
        or padding; that it computes with the pushed weights is proved at each push, and their fingerprint is given here."""
        model = self._tell("/server_info?config_format=json")["vllm_config"]["model_config"]
        label = self._tell("/weight_info")["weight_version"]
        return {
            "model": model.get("model"),
            "max_model_len": self.max_tokens,
            "vllm": self._tell("/version")["version"],
            "logprobs_mode": model.get("logprobs_mode"),
            "eos_token_ids": self.eos,
            "version": int(label) if label.isdecimal() else label,
            "fingerprint": self.fingerprint,
            "rollout_dtype": model.get("quantization") or str(model.get("dtype")).removeprefix("torch."),
            **self._settings,
        }

    def _tell(self, path: str) -> Any:
        return self._attempt(lambda: self.server.get(path), "asking what is served")

    # ---- resume, end

    def state_dict(self) -> dict[str, Any]:
        """Seed, position in the streams, version and fingerprint. The weights are the trainer's to save."""
        return {
            "seed": self.seed,
            "sampled": self._sampled,
            "version": self.version,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues the streams; push the weights before `generate`."""
        self.seed, self._sampled, self.version = state["seed"], state["sampled"], state["version"]

    def close(self) -> None:
        """Ends connections and threads; the server is left running. May be called twice."""
        self.closed = True
        self.server.http.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if isinstance(self.transfer, NCCLTransfer):
            self.transfer.close()


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Mean absolute difference; NaN where either is, which no comparison lets pass."""
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)


@contextlib.contextmanager
@torch.no_grad()
def _scaled(model: nn.Module, factor: float) -> Iterator[None]:
    """Every matrix of the model times `factor`, for a while; afterwards bit for bit what it was."""
    kept = [(p, p.detach().clone()) for p in model.parameters() if p.dim() >= 2]
    for p, _ in kept:
        p.mul_(factor)
    try:
        yield
    finally:
        for p, before in kept:
            p.copy_(before)
