"""Rollout engines: token ids in, sampled token ids and their log-probs out.

Every engine keeps its own copy of the weights and offers the same things: `generate(prompt_ids, ...) -> Rollout`,
`push_weights(model, version) -> fingerprint`, `copy_weights(model)` (what may be pushed later, from another thread, in place
of the model), `fingerprint`, `version`, `describe()`, `state_dict()` / `load_state_dict()`, `close()`.
A recipe pushes before each generation step and asserts that the fingerprint changed; a rollout whose weights never
arrived trains for weeks without an error message.

`TransformersEngine` runs in process. With `rollout_dtype` below float32 it is a real, if small, inference engine with
another precision than the trainer, so that training-inference mismatch exists on any machine.
"""

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.initialization import no_init_weights

from routing import Recorder, empty_routes, record_routing, routing_shape
from support import collect_support

ROLLOUT_DTYPES = ("float32", "bfloat16", "fp8", "int8", "int4")
LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}  # of float8_e4m3fn and of the symmetric integers
WRAPPER_NAMES = {"_orig_mod", "_checkpoint_wrapped_module"}  # what torch.compile and checkpoint wrappers add to names


@dataclass
class Rollout:
    """What an engine returns for N prompts: ragged lists, entry i belongs to prompt i.

    prompt_ids[i]      token ids of the prompt, unpadded
    completion_ids[i]  sampled token ids, T_i of them, including the EOS token if the model emitted one
    rollout_logps[i]   log mu of each sampled token, T_i float32 values, under the distribution that was sampled from:
                       temperature, top-k, top-p and min-p applied and renormalised
    finished[i]        True: ended by EOS; False: cut at max_new_tokens
    version[i]         weight version that sampled the sequence: the oldest one where several did
    token_versions[i]  weight version that sampled each token, T_i of them, not falling. None: all tokens by version[i]
    routes[i]          (S_i - 1, L, K) expert ids on the CPU, `routing`'s format: what the engine's L MoE layers used
                       at each token of prompt_ids[i] + completion_ids[i] but the last, whose routing no engine
                       computes; `routing.place_routes` lays them under a padded batch. None if not recorded. Not
                       compared by ==
    support[i]         (ids (nnz,), offsets (T_i + 1,)), int32 on the CPU: row t holds the token ids that top-k, top-p and
                       min-p left over where token t was drawn (`support`'s format). None if not recorded, or if nothing
                       was truncated. Not compared by ==
    kept_mass[i]       probability mass of that set before renormalising, T_i float32 values; None where support is, and from
                       a server, which does not tell
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    rollout_logps: list[list[float]]
    finished: list[bool]
    version: list[int]
    routes: list[torch.Tensor] | None = field(default=None, compare=False)  # tensors have no single truth value
    support: list[tuple[torch.Tensor, torch.Tensor]] | None = field(default=None, compare=False)
    kept_mass: list[list[float]] | None = None
    token_versions: list[list[int]] | None = None

    def __len__(self) -> int:
        return len(self.prompt_ids)


# ---------------------------------------------------------------- weights of a training model, adapters merged


@dataclass
class _Source:
    """One weight of the training model: where it lives, and which LoRA deltas belong on top of it."""

    name: str
    tensor: torch.Tensor
    deltas: list[tuple[LoraLayer, str]] = field(default_factory=list)

    @property
    def key(self) -> tuple:
        """Equal for two names that hold one and the same weight, as a tied embedding and head do."""
        return id(self.tensor), *((id(layer), adapter) for layer, adapter in self.deltas)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[torch.Tensor]:
        """The whole tensor on this process, detached, adapters added. A collective call where weights are sharded."""
        parts = dict.fromkeys([self.tensor, *(p for layer, _ in self.deltas for p in layer.parameters())])
        with _zero3_gathered(parts):
            whole = _full_tensor(self.tensor.detach())
            for layer, adapter in self.deltas:
                layer = _with_full_matrices(layer, adapter)
                if self.name.endswith(".bias"):
                    delta = layer.lora_B[adapter].bias * layer.scaling[adapter]
                else:
                    delta = layer.get_delta_weight(adapter)
                whole = whole + delta.to(whole.dtype)
            yield whole


def _zero3_gathered(tensors: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager:
    sharded = [t for t in tensors if hasattr(t, "ds_id")]  # DeepSpeed ZeRO-3 marks its parameters so
    if not sharded:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(sharded)


def _full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    # With CPU offload the shard lies on the host, while the collective needs the device of the mesh.
    return tensor.to(tensor.device_mesh.device_type).full_tensor() if isinstance(tensor, DTensor) else tensor


def _with_full_matrices(layer: LoraLayer, adapter: str) -> LoraLayer:
    """A stand-in for the layer whose LoRA matrices are whole: multiplied as shards they would round in another order
    than on one process, and the product over an expert stack does not exist for shards."""
    if not any(isinstance(p, DTensor) for p in layer.parameters()):
        return layer
    twin = copy.copy(layer)
    twin._modules = dict(layer._modules)
    for part in ("lora_A", "lora_B"):
        if adapter in getattr(layer, part):
            parameters = getattr(layer, part)[adapter].named_parameters()
            whole = {name: _full_tensor(p.detach()) for name, p in parameters}
            twin._modules[part] = {adapter: SimpleNamespace(**whole)}
    for part in ("lora_embedding_A", "lora_embedding_B"):
        if adapter in getattr(layer, part):
            twin._modules[part] = {adapter: _full_tensor(getattr(layer, part)[adapter].detach())}
    return twin


def unwrap(model: nn.Module) -> nn.Module:
    """Peels torch.compile, DDP, DeepSpeed and other `.module` wrappers off; a PEFT model stays a PEFT model."""
    while True:
        # `_modules`, because a PeftModel answers hasattr() for whatever lies inside it.
        inner = model._modules.get("_orig_mod", model._modules.get("module"))
        if inner is None:
            return model
        model = inner


def _base_model(model: nn.Module) -> nn.Module:
    model = unwrap(model)
    if isinstance(model, PeftModel):
        kinds = {str(config.peft_type).removeprefix("PeftType.") for config in model.peft_config.values()}
        if kinds != {"LORA"}:
            raise ValueError(
                f"the training model carries a {'/'.join(sorted(kinds))} adapter, and only LORA can be merged into "
                "the rollout engine's copy: train with LoRA or without PEFT"
            )
        model = unwrap(model.get_base_model())
    return model


def _weight_sources(module: nn.Module, prefix: str = "") -> Iterator[_Source]:
    """Every parameter and persistent buffer under the name it has in the plain model; nothing is gathered yet."""
    if isinstance(module, BaseTunerLayer):
        yield from _lora_sources(module, prefix)
        return
    if isinstance(module, ModulesToSaveWrapper):
        active = module.active_adapters
        yield from _weight_sources(module.modules_to_save[active[0]] if active else module.original_module, prefix)
        return
    if isinstance(module, AuxiliaryTrainingWrapper):
        raise ValueError(
            f"{prefix.rstrip('.')} is wrapped by PEFT's {type(module).__name__}, which cannot be merged into the "
            "rollout engine's copy: use modules_to_save for it"
        )
    for name, tensor in module._parameters.items():
        if tensor is not None:
            yield _Source(prefix + name, tensor)
    for name, tensor in module._buffers.items():
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield _Source(prefix + name, tensor)
    for name, child in module._modules.items():
        if child is not None:
            yield from _weight_sources(child, prefix if name in WRAPPER_NAMES else f"{prefix}{name}.")


def _lora_sources(layer: nn.Module, prefix: str) -> Iterator[_Source]:
    deltas: dict[str, list[tuple[LoraLayer, str]]] = {}
    while isinstance(layer, BaseTunerLayer):  # LoRA on several parameters of one module nests its layers
        if not isinstance(layer, LoraLayer):
            raise ValueError(
                f"{prefix.rstrip('.')} carries a PEFT {type(layer).__name__}, and only LoRA can be merged into the "
                "rollout engine's copy: train with LoRA or without PEFT"
            )
        target = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
        for adapter in layer.active_adapters:
            if adapter in layer.merged_adapters or adapter not in {*layer.lora_A, *layer.lora_embedding_A}:
                continue
            if adapter in layer.lora_variant:
                raise ValueError(
                    f"{prefix.rstrip('.')} uses the LoRA variant {type(layer.lora_variant[adapter]).__name__}, which "
                    "is more than W + delta and cannot be merged into the rollout engine's copy: use plain LoRA"
                )
            deltas.setdefault(target, []).append((layer, adapter))
            if layer.lora_bias[adapter]:
                deltas.setdefault("bias", []).append((layer, adapter))
        layer = layer.base_layer
    for source in _weight_sources(layer, prefix):
        source.deltas = deltas.get(source.name.removeprefix(prefix), [])
        yield source


def _checksums(weight: torch.Tensor) -> torch.Tensor:
    """(3,) int64 sums over the bit pattern, modulo 2^64: plain, weighted by row, weighted by column. Exact and
    independent of the order of summation, hence of the device."""
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[weight.element_size()]
    bits = weight.contiguous().view(integer)
    bits = bits.reshape(-1, bits.shape[-1] if bits.dim() > 1 else 1)
    rows, columns = bits.sum(1, dtype=torch.int64), bits.sum(0, dtype=torch.int64)
    steps = torch.arange(1, max(len(rows), len(columns)) + 1, device=weight.device)
    by_row, by_column = (rows * steps[: len(rows)]).sum(), (columns * steps[: len(columns)]).sum()
    return torch.stack((rows.sum(), by_row, by_column))


@dataclass
class Weights:
    """A copy of a training model's weights that no later update changes: what travels to an engine elsewhere.

    sources      one entry a weight, on the CPU, whole also where training shards them, adapters merged; tied weights
                 share one tensor
    model_class  the plain class of the model, without what FSDP mixes in
    config       its configuration
    """

    sources: list[_Source]
    model_class: type[PreTrainedModel]
    config: PreTrainedConfig


@torch.no_grad()
def copy_weights(model: nn.Module) -> Weights:
    """The weights of a training model, plain or wrapped, LoRA merged. A collective call where they are sharded."""
    base = _base_model(model)
    copies: dict[tuple, torch.Tensor] = {}
    sources = []
    for source in _settled_sources(base):
        if source.key not in copies:
            with source.gathered() as whole:
                copies[source.key] = whole.to("cpu", copy=True)
        sources.append(_Source(source.name, copies[source.key]))
    return Weights(sources, _plain_class(base), base.config)


def fingerprint_of(sources: Iterable[_Source]) -> str:
    """What `TransformersEngine.push_weights` returns for these weights, without an engine. Tied weights count once."""
    seen, described, sums = set(), [], []
    for source in sources:
        if source.key not in seen:
            seen.add(source.key)
            with source.gathered() as whole:
                described.append((source.name, tuple(whole.shape), str(whole.dtype)))
                sums.append(_checksums(whole).cpu())
    return _digest(described, sums)


def model_fingerprint(model: nn.Module) -> str:
    """What pushing this training model would return. A collective call where its weights are sharded."""
    return fingerprint_of(_settled_sources(_base_model(model)))


def _digest(described: list[tuple], sums: list[torch.Tensor]) -> str:
    return hashlib.sha256(repr((described, torch.stack(sums).tolist())).encode()).hexdigest()


def _settled_sources(base: nn.Module) -> list[_Source]:
    for module in base.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward without backward leaves rounded, gathered weights behind
    return list(_weight_sources(base))


def _plain_class(base: nn.Module) -> type[PreTrainedModel]:
    """fully_shard() swaps in a class of its own in front of the model's."""
    return next(cls for cls in type(base).__mro__ if not issubclass(cls, FSDPModule))


# ---------------------------------------------------------------- low precision


def _fake_quantize(x: torch.Tensor, rollout_dtype: str) -> torch.Tensor:
    """Rounds x (..., K) to fp8 e4m3, int8 or int4 with one scale per row of K values, and back to x's dtype."""
    top = LARGEST[rollout_dtype]
    amax = x.abs().amax(-1, keepdim=True)  # (..., 1)
    scale = torch.where(amax == 0, 1.0, amax / top).to(x.dtype)  # an all-zero row stays zero, not NaN
    scaled = x / scale
    rounded = scaled.to(torch.float8_e4m3fn).to(x.dtype) if rollout_dtype == "fp8" else scaled.round()
    return rounded.mul_(scale)


def _quantize_input(module: nn.Module, args: tuple) -> tuple:
    return (_fake_quantize(args[0], "fp8"), *args[1:])


# ---------------------------------------------------------------- the key/value cache


class _BlockLayer(DynamicLayer):
    """Keys and values (B, H, S, D) of one layer in buffers that grow by blocks: a step writes one column instead of
    copying the whole cache, as concatenation does."""

    block = 64  # columns added at least, when a buffer is full

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys = self.key_buffer = key_states
            self.values = self.value_buffer = value_states
            return self.keys, self.values
        start = self.keys.shape[-2]
        end = start + key_states.shape[-2]
        if end > self.key_buffer.shape[-2]:
            self.key_buffer = self._grown(self.keys, end)
            self.value_buffer = self._grown(self.values, end)
        self.key_buffer[:, :, start:end] = key_states
        self.value_buffer[:, :, start:end] = value_states
        self.keys, self.values = self.key_buffer[:, :, :end], self.value_buffer[:, :, :end]
        return self.keys, self.values

    def _grown(self, states, end):
        buffer = states.new_empty(*states.shape[:2], end + max(self.block, end // 4), states.shape[3])
        buffer[:, :, : states.shape[2]] = states
        return buffer

    def batch_select_indices(self, indices):
        length = self.keys.shape[-2]
        self.key_buffer, self.value_buffer = self.key_buffer[indices], self.value_buffer[indices]
        self.keys, self.values = self.key_buffer[:, :, :length], self.value_buffer[:, :, :length]


# ---------------------------------------------------------------- the engine


class TransformersEngine:
    """Samples in process from its own copy of the model's weights.

    model          the training model: plain, or wrapped by DDP, accelerate, FSDP2, DeepSpeed, torch.compile, LoRA; or
                   its `copy_weights`. The engine's copy is built from its class and config, so patches and hooks on
                   the instance stay behind, and is filled by a first push as version 0. Where weights are sharded, all
                   ranks must construct and push.
    eos_token_ids  one id or several; any of them ends a sequence
    pad_token_id   fills the left of shorter prompts; never attended to
    rollout_dtype  precision of the copy:
                   float32   no mismatch but rounding of sums
                   bfloat16  weights, activations and cache in bfloat16, log-softmax in float32
                   int8      weights rounded to symmetric int8, one scale per output channel (W8A16's weights)
                   int4      the same with 4 bits (W4A16's weights; served ones have a scale per 128 inputs)
                   fp8       weights rounded to e4m3 with one scale per output channel, and inputs of those layers with
                             one dynamic scale per token, which is how vLLM serves FP8 (W8A8, its FP8-dynamic scheme)
                   fp8, int8 and int4 touch every nn.Linear but the output head, and every 3-D expert stack (one scale per
                   expert and output channel; between the two expert matrices activations stay float32). Embeddings,
                   norms, routers and the head stay whole, as in those engines. Products are computed in float32 on the
                   rounded values, so this costs memory and time of float32 and only the numbers are those of 8 bits.
                   Mean |log pi - log mu| of a sampled token at temperature 1, trainer in float32, on
                   SmolLM2-135M-Instruct (on the tests' random tiny Qwen3): float32 2e-6 (6e-7), bfloat16 0.03 (0.02),
                   int8 0.05 (0.02), fp8 0.17 (0.15). Near-uniform models show ten times less.
    seed           of the random streams, see `generate`. The global RNG is never read or moved.
    device         default: that of the training model
    record_routes  fill `Rollout.routes` with the experts that the copy used, for routing replay R3. A dense model has
                   none: its rollouts carry None. An unknown kind of router is refused by name.
    record_support fill `Rollout.support` and `kept_mass` where sampling is truncated, for the sampling-mask replay.
    """

    # Finished rows are dropped once they are this share of the batch: dropping copies the cache, keeping costs a row.
    compact_share = 0.125

    def __init__(
        self,
        model: nn.Module | Weights,
        eos_token_ids: int | Sequence[int],
        pad_token_id: int,
        rollout_dtype: str = "float32",
        seed: int = 0,
        device: torch.device | str | None = None,
        record_routes: bool = False,
        record_support: bool = False,
    ):
        if rollout_dtype not in ROLLOUT_DTYPES:
            raise ValueError(f"rollout_dtype is {rollout_dtype!r}: choose one of {', '.join(ROLLOUT_DTYPES)}")
        if isinstance(model, Weights):
            sources, model_class, config = model.sources, model.model_class, model.config
        else:
            base = _base_model(model)
            if not isinstance(base, PreTrainedModel):
                raise ValueError(f"model is a {type(base).__name__} inside its wrappers: give a PreTrainedModel")
            sources, model_class, config = list(_weight_sources(base)), _plain_class(base), base.config
        self.rollout_dtype = rollout_dtype
        self.device = torch.device(device) if device is not None else sources[0].tensor.device
        dtype = torch.bfloat16 if rollout_dtype == "bfloat16" else torch.float32
        self.model = _empty_copy(model_class, config, sources, dtype, self.device)
        self._quantized = self._prepare_quantization() if rollout_dtype in LARGEST else set()
        self._targets = {source.name: source.tensor for source in _weight_sources(self.model)}
        self._routing = routing_shape(self.model) if record_routes else None
        self._record_support = record_support

        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        eos = [eos_token_ids] if isinstance(eos_token_ids, int) else sorted(set(eos_token_ids))
        if not eos or not all(0 <= token < vocabulary for token in [*eos, pad_token_id]):
            raise ValueError(
                f"eos_token_ids={eos_token_ids} and pad_token_id={pad_token_id} must be ids within the model's "
                f"{vocabulary} embeddings, at least one EOS among them: take them from the model's tokenizer"
            )
        self._is_eos = torch.zeros(vocabulary, dtype=torch.bool, device=self.device)
        self._is_eos[eos] = True
        self.pad_token_id = pad_token_id

        self._settings: dict[str, float] = {}  # of the last generation
        self.seed = seed
        self._sampled = 0  # the next sequence's stream, where the caller names none
        self.fingerprint = ""
        self.version = 0
        self._lacks_weights = True
        self.push_weights(model, version=0)

    # ---- weights

    copy_weights = staticmethod(copy_weights)

    @torch.no_grad()
    def push_weights(self, model: nn.Module | Weights, version: int) -> str:
        """Copies the training model's weights, LoRA merged, into the engine and returns their fingerprint.

        The fingerprint is a SHA-256 over name, shape, dtype and three integer checksums of the bit pattern of each
        tensor as the training model holds it, before any rounding to `rollout_dtype`. Equal weights give equal
        fingerprints. A change of one value always shows. What cannot show: changes inside one tensor that leave all
        three sums equal modulo 2^64, for instance a cell pattern +d -d -d +d at the corners of a rectangle; an
        optimizer step does not do that.

        Raises ValueError naming weights that were pushed but not expected, expected but not pushed, or of another
        shape. Weights that are sharded (FSDP2, ZeRO-3) are gathered one at a time: all ranks must call this together.
        """
        sources = model.sources if isinstance(model, Weights) else _settled_sources(_base_model(model))
        names = {source.name for source in sources}
        missing, unexpected = sorted(self._targets.keys() - names), sorted(names - self._targets.keys())
        if missing or unexpected:
            raise ValueError(
                f"the training model does not match the rollout engine's copy: missing {missing or 'nothing'}, "
                f"unexpected {unexpected or 'nothing'}; build the engine from the model that is trained"
            )
        self._lacks_weights = True  # until the last one has arrived
        filled: dict[int, tuple] = {}  # engine tensor -> the source it was filled from
        described, sums = [], []
        for source in sources:
            target = self._targets[source.name]
            if id(target) in filled:
                if filled[id(target)] != source.key:
                    raise ValueError(
                        f"{source.name} shares its storage in the rollout engine but not in the training model: build "
                        "the engine after adapters are attached"
                    )
                continue
            filled[id(target)] = source.key
            with source.gathered() as whole:
                if whole.shape != target.shape or whole.is_floating_point() != target.is_floating_point():
                    raise ValueError(
                        f"{source.name} is {tuple(whole.shape)} {whole.dtype} in the training model and "
                        f"{tuple(target.shape)} {target.dtype} in the rollout engine: build the engine after the last "
                        "resize, and load the training model unquantised"
                    )
                described.append((source.name, tuple(whole.shape), str(whole.dtype)))
                sums.append(_checksums(whole).to(self.device))
                target.copy_(self._rounded(whole.to(self.device), target))
        self.fingerprint = _digest(described, sums)
        self.version = int(version)
        self._lacks_weights = False
        return self.fingerprint

    def _rounded(self, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return _fake_quantize(weight.float(), self.rollout_dtype) if id(target) in self._quantized else weight

    def _prepare_quantization(self) -> set[int]:
        """ids of the weights to round; for fp8 also hooks that round the inputs of their modules."""
        head, chosen = self.model.get_output_embeddings(), set()
        for module in self.model.modules():
            if module is head:
                continue
            weights = [p for p in module._parameters.values() if p is not None and p.dim() == 3]
            if isinstance(module, nn.Linear):
                weights.append(module.weight)
            if weights and self.rollout_dtype == "fp8":
                module.register_forward_pre_hook(_quantize_input)
            chosen.update(map(id, weights))
        return chosen

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
        between_tokens: Callable[[], None] | None = None,
    ) -> Rollout:
        """Samples one completion for each of the N prompts (repeat a prompt for a group: it is prefilled once).

        Logits are processed in float32 as `transformers` does: temperature, top-k, top-p, min-p, in this order;
        neutral values (1.0, 0, 1.0, 0.0) cost nothing. The log-probs are those of the processed distribution.
        temperature 0 is greedy: the largest logit, with its log-prob under the unprocessed distribution; the other
        filters do not apply. Weights that give NaN logits give NaN log-probs, for the caller's guard to see.

        Every sequence has its own stream of random numbers, given by the engine's seed and its entry in `sequence_ids`
        (N different integers; default: counting on from the last call). So its tokens do not depend, beyond floating
        point, on which rows or processes share the work: number the sequences over all processes and one process
        samples what many do. `batch_size` bounds the rows, hence the memory, in flight. `on_progress(finished, total)`
        is called whenever more sequences have ended.

        `between_tokens()` is called before each forward but the prompts'. It may push weights: the tokens to come are
        sampled by them, over keys and values that the weights before computed, and `token_versions` says which token is
        whose. Whatever it raises ends the call.

        Raises ValueError on bad input, naming it.
        """
        prompts = [list(prompt) for prompt in prompt_ids]
        self._settings = {
            "temperature": float(temperature),
            "top_p": float(top_p),
            "top_k": top_k,
            "min_p": float(min_p),
        }
        self._check(prompts, max_new_tokens, temperature, top_k, top_p, min_p, batch_size)
        total, size = len(prompts), batch_size or len(prompts)
        if sequence_ids is None:
            sequence_ids = range(self._sampled, self._sampled + total)
            self._sampled += total
        if len(sequence_ids) != total or len(set(sequence_ids)) != total:
            raise ValueError(
                f"sequence_ids holds {len(set(sequence_ids))} different integers for {total} prompts: give each "
                "sequence its own, as equal ones would repeat a sample"
            )
        greedy = temperature == 0
        noise = None if greedy else _noise(self.seed, sequence_ids, max_new_tokens)
        warp = None if greedy else _warpers(temperature, top_k, top_p, min_p)
        rollout = Rollout(prompts, [], [], [], [], routes=None if self._routing is None else [])
        if between_tokens is not None:
            rollout.token_versions = []
        if self._record_support and not greedy and (top_k > 0 or top_p < 1 or min_p > 0):
            rollout.support, rollout.kept_mass = [], []
        for start in range(0, total, size):
            part = slice(start, start + size)
            report = on_progress and (lambda done, start=start: on_progress(start + done, total))
            recording = contextlib.nullcontext() if self._routing is None else record_routing(self.model)
            with recording as recorder:
                noted = None if rollout.support is None else []
                tokens, logps, routes, versions = self._sample(
                    prompts[part],
                    max_new_tokens,
                    warp,
                    None if greedy else noise[part],
                    report,
                    recorder,
                    between_tokens,
                    noted,
                )
            ends = self._is_eos[tokens]  # (n, T)
            finished = ends.any(-1)  # (n,)
            lengths = torch.where(finished, ends.int().argmax(-1) + 1, max_new_tokens).tolist()
            rollout.completion_ids += [row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True)]
            rollout.rollout_logps += [row[:length] for row, length in zip(logps.tolist(), lengths, strict=True)]
            rollout.finished += finished.tolist()
            rollout.version += [versions[0]] * len(lengths)
            if between_tokens is not None:
                rollout.token_versions += [versions[:length] for length in lengths]
            if noted is not None:
                rollout.support += collect_support([step[:3] for step in noted], lengths)
                mass = torch.zeros(len(lengths), len(noted), device=self.device)
                for step, (rows, _, _, kept) in enumerate(noted):
                    mass[rows, step] = kept
                rollout.kept_mass += [row[:length] for row, length in zip(mass.tolist(), lengths, strict=True)]
            if routes is not None:
                width = max(map(len, prompts[part]))
                for row, prompt, length in zip(routes.cpu(), prompts[part], lengths, strict=True):
                    # Cloned: a slice would keep the padded buffer of the whole batch alive.
                    rollout.routes.append(row[width - len(prompt) : width + length - 1].clone())
        return rollout

    @torch.inference_mode()
    def _sample(
        self,
        prompts: list[list[int]],
        steps: int,
        warp: LogitsProcessorList | None,
        noise: torch.Tensor | None,
        report: Callable[[int], None] | None,
        recorder: Recorder | None,
        between_tokens: Callable[[], None] | None,
        noted: list | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, list[int]]:
        """n prompts -> tokens (n, T), their log-probs (n, T), with a recorder the routes (n, W + T - 1, L, K) of prompts
        padded on the left to W and of all tokens but the last, and the weight version of each step (up to T); whatever
        follows a row's first EOS is undefined. noted, if a list, receives for each step what `_surviving` says of the
        rows it served.
        """
        n, device = len(prompts), self.device
        tokens = torch.zeros(n, steps, dtype=torch.long, device=device)  # (n, T)
        logps = torch.zeros(n, steps, dtype=torch.float32, device=device)  # (n, T)
        if noise is not None:
            noise = noise.to(device, torch.float32 if device.type == "mps" else torch.float64)  # (n, T)
        with torch.autocast(device.type, enabled=False):  # the caller may be inside the trainer's autocast
            logits, cache, positions, padding, index = self._prefill(prompts, steps)
            width, routes, versions = cache.get_seq_length(), None, [self.version]
            if recorder is not None:
                size = n, width + steps - 1, self._routing.layers, self._routing.top_k
                routes = empty_routes(size, self._routing.experts, device)
                routes[:, :width] = recorder.take()[index]
            rows = torch.arange(n, device=device)  # (b,) which row of `tokens` each one is
            alive = torch.ones(n, dtype=torch.bool, device=device)  # (b,)
            ended = 0
            # Reading a result from an accelerator waits for it; sampling a few tokens too many is cheaper.
            every = 1 if device.type == "cpu" else 8
            for step in range(steps):
                scores = logits.float() if warp is None else warp(None, logits.float())  # (b, V)
                picked, logp = _pick(scores, None if noise is None else noise[rows, step])
                if noted is not None:
                    noted.append((rows, *_surviving(scores, logits, warp)))
                tokens[rows, step] = picked
                logps[rows, step] = logp
                if step + 1 == steps:
                    break
                alive = alive & ~self._is_eos[picked]
                if (step + 1) % every == 0:
                    left = int(alive.sum())
                    if report and n - left > ended:
                        ended = n - left
                        report(ended)
                    if left == 0:
                        break
                    if len(rows) - left >= self.compact_share * len(rows):
                        keep = alive.nonzero().squeeze(1)  # (b',)
                        cache.batch_select_indices(keep)
                        rows, alive, picked, positions = rows[keep], alive[keep], picked[keep], positions[keep]
                        padding = None if padding is None else padding[keep]
                if between_tokens is not None:
                    between_tokens()
                versions.append(self.version)
                logits = self.model(
                    input_ids=picked[:, None],
                    attention_mask=None if padding is None else padding[..., : width + step + 1],
                    position_ids=positions[:, None],
                    cache=cache,
                    use_cache=True,
                ).logits[:, -1]  # (b, V)
                positions = positions + 1
                if recorder is not None:
                    routes[rows, width + step] = recorder.take()[:, 0]
        if report:
            report(n)
        return tokens, logps, routes, versions

    def _prefill(
        self, prompts: list[list[int]], steps: int
    ) -> tuple[torch.Tensor, DynamicCache, torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Runs the prompts, each distinct one once; returns logits (n, V), the cache, the next positions (n,), the
        mask of left padding over all columns to come (None if there is no padding), and the row (n,) that ran for each
        prompt."""
        device, distinct = self.device, list(dict.fromkeys(map(tuple, prompts)))
        place = {prompt: i for i, prompt in enumerate(distinct)}
        width = max(map(len, distinct))
        ids = torch.tensor([[self.pad_token_id] * (width - len(p)) + list(p) for p in distinct], device=device)
        lengths = torch.tensor([len(p) for p in distinct], device=device)  # (u,)
        columns = torch.arange(width + steps, device=device)
        real = columns >= (width - lengths)[:, None]  # (u, width + T)
        padded = any(len(p) < width for p in distinct)
        cache = DynamicCache(config=self.model.config)
        plain = all(type(layer) is DynamicLayer for layer in cache.layers)
        if plain:
            cache.layers = [_BlockLayer() for _ in cache.layers]
        logits = self.model(
            input_ids=ids,
            attention_mask=real[:, :width].long() if padded else None,
            position_ids=(columns[:width] - (width - lengths)[:, None]).clamp(min=0),
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]  # (u, V)
        index = torch.tensor([place[tuple(p)] for p in prompts], device=device)
        cache.batch_select_indices(index)
        padding = None
        if padded and plain and self.model.config._attn_implementation in ("sdpa", "eager"):
            # Additive and four-dimensional, as these two use it: built once instead of at every step.
            dtype = self.model.dtype
            padding = torch.zeros(real.shape, dtype=dtype, device=device).masked_fill(~real, torch.finfo(dtype).min)
            padding = padding[index][:, None, None, :]  # (n, 1, 1, width + T)
        elif padded:
            padding = real[index].long()  # (n, width + T)
        return logits[index], cache, lengths[index], padding, index

    def _check(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        batch_size: int | None,
    ) -> None:
        if self._lacks_weights:
            raise ValueError(
                "the engine does not hold the weights of its version (state loaded, or a push failed): call "
                "push_weights before generate"
            )
        if not prompts:
            raise ValueError("prompt_ids is empty: give at least one prompt")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}: give at least 1")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: give at least 1, or None for all rows at once")
        if temperature < 0 or top_k < 0 or not 0 < top_p <= 1 or not 0 <= min_p <= 1:
            raise ValueError(
                f"temperature={temperature}, top_k={top_k}, top_p={top_p}, min_p={min_p}: need temperature >= 0, "
                "top_k >= 0, 0 < top_p <= 1 and 0 <= min_p <= 1"
            )
        limit, vocabulary = self.model.config.get_text_config().max_position_embeddings, len(self._is_eos)
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {i} has no token: a prompt needs at least one, for example the BOS token")
            if len(prompt) + max_new_tokens > limit:
                raise ValueError(
                    f"prompt {i} has {len(prompt)} tokens, which with max_new_tokens={max_new_tokens} passes the "
                    f"model's {limit} positions: drop or shorten it, or lower max_new_tokens"
                )
            if min(prompt) < 0 or max(prompt) >= vocabulary:
                raise ValueError(
                    f"prompt {i} holds a token id outside 0..{vocabulary - 1}: use the model's own tokenizer"
                )

    def close(self) -> None:
        """Nothing to end: this engine has neither process nor connection."""

    def describe(self) -> dict[str, Any]:
        """What this side goes by, to be compared with the training side; the sampling settings are those last used."""
        return {
            "model_type": self.model.config.model_type,
            "embeddings": len(self._is_eos),
            "eos_token_ids": self._is_eos.nonzero().squeeze(1).tolist(),
            "pad_token_id": self.pad_token_id,
            "version": self.version,
            "fingerprint": self.fingerprint,
            "rollout_dtype": self.rollout_dtype,
            **self._settings,
        }

    # ---- resume

    def state_dict(self) -> dict[str, Any]:
        """Seed, position in the random streams, version and fingerprint. The weights are the trainer's to save."""
        return {
            "seed": self.seed,
            "sampled": self._sampled,
            "version": self.version,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues the random streams bit for bit. Where the engine holds other weights than those of the state,
        `generate` refuses until they are pushed, so that no rollout carries the version of weights it did not use."""
        lacking = {"seed", "sampled", "version", "fingerprint"} - set(state)
        if lacking:
            raise ValueError(f"the engine's saved state lacks {sorted(lacking)}: resume from a complete checkpoint")
        self.seed, self._sampled, self.version = state["seed"], state["sampled"], state["version"]
        self._lacks_weights = self.fingerprint != state["fingerprint"]


def _noise(seed: int, sequence_ids: Sequence[int], steps: int) -> torch.Tensor:
    """(N, T) uniform in [0, 1), on the CPU whatever the device: row i depends on the seed and sequence_ids[i] alone.

    float64, as the 24 bits of a float32 would never reach a token of probability below 6e-8.
    """
    generator = torch.Generator()
    noise = torch.empty(len(sequence_ids), steps, dtype=torch.float64)
    for row, sequence in zip(noise, sequence_ids, strict=True):
        # Hashed, as the CPU generator reads 32 bits of its seed only, where ids that differ by 2**32 would coincide.
        digest = hashlib.blake2b(f"{seed} {sequence}".encode(), digest_size=4).digest()
        torch.rand(steps, generator=generator.manual_seed(int.from_bytes(digest)), out=row)
    return noise


def _warpers(temperature: float, top_k: int, top_p: float, min_p: float) -> LogitsProcessorList:
    warpers = LogitsProcessorList()
    if temperature != 1:
        warpers.append(TemperatureLogitsWarper(float(temperature)))
    if top_k > 0:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        warpers.append(MinPLogitsWarper(min_p))
    return warpers


def _pick(scores: torch.Tensor, noise: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """scores (b, V) float32, filtered; noise (b,) uniform in [0, 1) -> token ids (b,) and their log-probs (b,). Inverts
    the cumulative distribution at the noise; without noise takes the largest score."""
    logps = scores.log_softmax(-1)  # (b, V)
    if noise is None:
        picked = scores.argmax(-1, keepdim=True)  # (b, 1)
    else:
        heights = logps.exp().cumsum(-1, dtype=noise.dtype)  # (b, V), rises only where mass is
        # The factor keeps the target below the total after rounding; else a token of no mass could be picked.
        below_one = 1 - 4 * torch.finfo(noise.dtype).eps
        picked = torch.searchsorted(heights, noise[:, None] * below_one * heights[:, -1:], right=True)  # (b, 1)
        picked = picked.clamp(max=logps.shape[-1] - 1)  # NaN logits: a NaN log-prob instead of an index error
    return picked.squeeze(1), logps.gather(1, picked).squeeze(1)


def _surviving(
    scores: torch.Tensor, logits: torch.Tensor, warp: LogitsProcessorList
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Filtered scores (b, V) of logits (b, V) -> how many tokens the filters left over (b,), their ids row by row, and
    their mass (b,) in the distribution of the same temperature. A row of NaN has none."""
    kept = scores > -torch.inf  # (b, V)
    heat = next((w.temperature for w in warp if isinstance(w, TemperatureLogitsWarper)), 1.0)
    mass = (scores.logsumexp(-1) - (logits.float() / heat).logsumexp(-1)).exp()
    return kept.sum(-1), kept.nonzero()[:, 1].to(torch.int32), mass


def _empty_copy(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    sources: list[_Source],
    dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    """Same architecture, own uninitialised storage, none of the instance's patches, hooks or shards (which a deepcopy
    would carry along)."""
    config = copy.deepcopy(config)
    config.use_cache = True
    config.output_attentions = config.output_hidden_states = False
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False  # else the balancing loss is computed at every sampled token
    config.dtype = dtype
    if dtype == torch.float32 and str(config._attn_implementation).startswith("flash"):
        raise ValueError(f"{config._attn_implementation} has no float32: use rollout_dtype bfloat16 or sdpa attention")
    # A tied model whose head or embedding alone carries an adapter is no longer tied once merged.
    first: dict[tuple, str] = {}
    for source in sources:
        first.setdefault(source.key, source.name)
    if set(first.values()) & set(model_class._tied_weights_keys or ()):
        config.tie_word_embeddings = False
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)  # unlike .to(dtype), leaves float32 buffers such as RoPE frequencies alone
        with no_init_weights(), torch.device(device):
            model = model_class(config)
    finally:
        torch.set_default_dtype(before)
    model.tie_weights()  # skipped together with the initialisation
    return model.requires_grad_(False).eval()
