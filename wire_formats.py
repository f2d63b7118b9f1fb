"""What rollout servers send, decoded and checked: expert routes, sampling masks, log-probs, weight versions.

One interface: a decoder of routes is a function (choice, tokens) -> (tokens - 1, L, K) expert ids, `routing`'s compact
format, for a sequence of `tokens` tokens, prompt included. The last token was sampled and never fed forward, so it has
no row. Whatever does not fit is a `WireError` in one sentence: a wrong row trains on another token's experts silently.

    vLLM    choice["routed_experts"]                base64 of .npy bytes, (tokens - 1, layers, K), uint8 | uint16 | int32
    SGLang  choice["meta_info"]["routed_experts"], or choice["sgl_ext"]["routed_experts"]
                                                    base64 of raw little-endian int32, flat, the same shape
    vLLM    choice["sampling_mask"]                 one list of kept token ids for each generated token
    vLLM    choice["weight_versions"]               [{"version", "start", "end"}], spans over the generated tokens

Layers are those with experts, or all decoder layers: then the rows of dense ones are left out.
"""

import base64
import binascii
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from routing import RoutingShape, routes_dtype

RouteDecoder = Callable[[dict[str, Any], int], torch.Tensor]
NOT_A_NUMBER = -9999.0  # what vLLM writes for a log-prob that JSON cannot hold: NaN and -inf


class WireError(ValueError):
    """A server's answer that is not what it documents."""


# ---------------------------------------------------------------- routes


def vllm_route_decoder(shape: RoutingShape, moe_layers: Sequence[int], layers: int) -> RouteDecoder:
    """Of a model with `layers` decoder layers, of which those in `moe_layers` have experts."""

    def decode(choice: dict[str, Any], tokens: int) -> torch.Tensor:
        text = choice.get("routed_experts")
        if text is None:
            raise WireError("the answer carries no routed_experts: start vLLM with --enable-return-routed-experts")
        try:
            array = np.load(io.BytesIO(_bytes(text)), allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise WireError(f"routed_experts is no .npy file ({error}): the answer was cut, or altered") from error
        if array.dtype not in (np.uint8, np.uint16, np.int32):
            raise WireError(f"routed_experts is {array.dtype}: vLLM documents uint8, uint16 or int32")
        return _checked(array, tokens, shape, moe_layers, layers)

    return decode


def sglang_route_decoder(shape: RoutingShape, moe_layers: Sequence[int], layers: int) -> RouteDecoder:
    """As `vllm_route_decoder`, of SGLang's native and OpenAI endpoints. It counts dense layers too."""

    def decode(choice: dict[str, Any], tokens: int) -> torch.Tensor:
        holder = choice.get("meta_info") or choice.get("sgl_ext") or {}
        text = holder.get("routed_experts")
        if text is None:
            raise WireError("the answer carries no routed_experts: start SGLang with --enable-return-routed-experts")
        data = _bytes(text)
        a_token = 4 * layers * shape.top_k
        if len(data) % a_token:
            raise WireError(
                f"routed_experts holds {len(data)} bytes, no multiple of {a_token} = {layers} layers x {shape.top_k} experts x 4 "
                "bytes: the answer was cut, or the model has another shape"
            )
        return _checked(np.frombuffer(data, "<i4").reshape(-1, layers, shape.top_k), tokens, shape, moe_layers, layers)

    return decode


def _bytes(text: Any) -> bytes:
    if not isinstance(text, str):
        raise WireError(f"routed_experts is a {type(text).__name__}: base64 text is documented")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise WireError(f"routed_experts is no base64 ({error}): the answer was cut, or altered") from error


def _checked(
    array: np.ndarray, tokens: int, shape: RoutingShape, moe_layers: Sequence[int], layers: int
) -> torch.Tensor:
    """(rows, layers or L, K) -> (tokens - 1, L, K), compact."""
    if array.ndim != 3 or array.shape[1] not in (shape.layers, layers) or array.shape[2] != shape.top_k:
        raise WireError(
            f"routed_experts has shape {array.shape}: this model needs (tokens - 1, {shape.layers} MoE or {layers} decoder "
            f"layers, {shape.top_k} experts a token)"
        )
    if len(array) != tokens - 1:
        raise WireError(
            f"routed_experts has {len(array)} rows for {tokens} tokens: {tokens - 1} are due, all tokens but the last, from "
            "the first prompt token on"
        )
    if array.shape[1] != shape.layers:
        array = array[:, list(moe_layers)]
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    if low < 0 or high >= shape.experts:
        raise WireError(
            f"routed_experts names expert {low if low < 0 else high} of a model with {shape.experts}: logical ids are needed, not "
            "the physical ones of an expert-parallel placement"
        )
    # Sorted rows: an id twice would stand beside itself. Rows are few kinds of pairs, so this is the cheap check.
    ordered = np.sort(array, -1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise WireError(
            "routed_experts names an expert twice for one token: rows of it were overwritten, or are padding"
        )
    kind = np.uint8 if routes_dtype(shape.experts) == torch.uint8 else np.int16
    return torch.from_numpy(np.ascontiguousarray(array, dtype=kind))


# ---------------------------------------------------------------- sampling masks


def sampling_support(choice: dict[str, Any], ids: Sequence[int], vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that survived top-k, top-p and min-p at each of the T generated tokens: (token_ids (nnz,), offsets
    (T + 1,)), both int32, rows in order. An empty row means the full vocabulary."""
    rows = choice.get("sampling_mask")
    if rows is None:
        raise WireError("the answer carries no sampling_mask: start vLLM with --return-sampling-mask")
    if not isinstance(rows, list) or len(rows) != len(ids):
        raise WireError(
            f"sampling_mask has {len(rows) if isinstance(rows, list) else 'no'} rows for {len(ids)} tokens"
        )
    for place, (row, token) in enumerate(zip(rows, ids, strict=True)):
        if not isinstance(row, list) or (row and token not in row):
            raise WireError(f"sampling_mask row {place} lacks token {token}, which was sampled there")
        if len(set(row)) < len(row):
            raise WireError(f"sampling_mask row {place} names a token twice, which would count twice in training")
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0).to(torch.int32)
    kept = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
    if kept.numel() and not 0 <= int(kept.min()) <= int(kept.max()) < vocabulary:
        raise WireError(f"sampling_mask names a token outside the vocabulary of {vocabulary}")
    return kept, offsets


# ---------------------------------------------------------------- tokens


def sampled_tokens(choice: dict[str, Any], limit: int, vocabulary: int) -> tuple[list[int], list[float], bool]:
    """-> token ids (T,), their log-probs (T,), ended by itself."""
    ids = choice.get("token_ids")
    if not isinstance(ids, list) or not 1 <= len(ids) <= limit:
        raise WireError(
            f"the answer has {len(ids) if isinstance(ids, list) else 'no'} token_ids, 1 to {limit} are due"
        )
    if not all(isinstance(i, int) and 0 <= i < vocabulary for i in ids):
        raise WireError(f"the answer names a token outside the vocabulary of {vocabulary}: another model is served")
    content = (choice.get("logprobs") or {}).get("content")
    if not isinstance(content, list) or len(content) != len(ids):
        raise WireError(f"{len(content) if isinstance(content, list) else 'no'} log-probs came for {len(ids)} tokens")
    logps = []
    for place, (token, entry) in enumerate(zip(ids, content, strict=True)):
        if entry.get("token_id", token) != token:
            raise WireError(f"log-prob {place} is of token {entry['token_id']}, but token {token} was sampled there")
        value = entry.get("logprob")
        if not isinstance(value, int | float) or not value > NOT_A_NUMBER:  # one NaN here makes every weight NaN
            raise WireError(f"log-prob {place} is {value!r}, no number")
        logps.append(float(value))
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise WireError(f"the sequence ended with finish_reason {reason!r}: stop or length are due")
    return ids, logps, reason == "stop"


def token_versions(choice: dict[str, Any], tokens: int) -> list[str] | None:
    """The label of the weights that sampled each of T tokens; None from a server that does not say."""
    spans = choice.get("weight_versions")
    if spans is None:
        return None
    labels: list[str] = []
    for span in spans:
        if span["start"] != len(labels) or span["end"] < span["start"]:
            raise WireError(f"weight_versions {spans} are not contiguous spans over {tokens} tokens")
        labels += [span["version"]] * (span["end"] - span["start"])
    if len(labels) != tokens:
        raise WireError(f"weight_versions {spans} cover {len(labels)} of {tokens} tokens")
    return labels


def prompt_logps(answer: dict[str, Any], ids: Sequence[int]) -> list[float]:
    """Log-probs of a scored prompt (S,) -> S - 1 values; the first token has none."""
    rows = answer.get("prompt_logprobs")
    if not isinstance(rows, list) or len(rows) != len(ids):
        raise WireError(f"{len(rows) if isinstance(rows, list) else 'no'} prompt log-probs came for {len(ids)} tokens")
    values = []
    for place, token in enumerate(ids[1:], 1):
        entry = (rows[place] or {}).get(str(token))
        if entry is None:
            raise WireError(f"prompt log-prob {place} lacks token {token}")
        values.append(float(entry["logprob"]))
    return values
