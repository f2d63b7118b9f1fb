"""What GradLoc reads out of a batch: which tokens count, their ids and prompts, the log-probs and advantages recorded beside them."""

import hashlib
import math
import statistics
from collections.abc import Mapping

import torch

MASKS = ("mask", "completion_mask", "response_mask", "loss_mask")
EXTRAS = {  # names in batches -> names in the report
    "rollout_logps": "rollout_logps", "sampling_per_token_logps": "rollout_logps",
    "old_logps": "old_logps", "old_per_token_logps": "old_logps",
    "ref_logps": "ref_logps", "ref_per_token_logps": "ref_logps",
    "advantages": "advantages", "rewards": "rewards", "version": "version",
}  # fmt: skip


def copies(outputs):
    """What a logps_fn returned, in tensors of its own."""
    if isinstance(outputs, torch.Tensor):
        return outputs.clone()
    if isinstance(outputs, Mapping):
        return {name: copies(value) for name, value in outputs.items()}
    return tuple(map(copies, outputs)) if isinstance(outputs, list | tuple) else outputs


def mask_and_ids(batch, shape):
    """(mask, ids) of a batch in the shape of its log-probs, None where they cannot be told."""
    if not isinstance(batch, Mapping):
        return None, None
    n, t = shape

    def fitting(name):
        value = batch.get(name)
        fits = isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[0] == n and value.shape[1] >= t
        return value[:, value.shape[1] - t :] if fits else None

    masks = [m for m in map(fitting, MASKS) if m is not None]
    mask = masks[0] != 0 if masks else None
    labels = fitting("labels")
    if mask is None and labels is not None:
        mask = labels != -100
    ids = fitting("completion_ids")
    return mask, fitting("input_ids") if ids is None else ids


def extras_of(batch, shape):
    """{name in the report: tensor} of what a batch holds beside its ids, where it fits log-probs of this shape (N, T)."""
    extras = {}
    for name, known in EXTRAS.items():
        value = batch.get(name)
        if (
            isinstance(value, torch.Tensor)
            and value.shape[:1] == shape[:1]
            and (value.dim() == 1 or value.shape[1] <= shape[1])
        ):
            extras[known] = value.detach()
    return extras


def value_at(value, call, row, column):
    """A recorded tensor's number for one token; None where it has none. (N,) and (N, 1) belong to the sequence."""
    if value.dim() == 1:
        return float(value[row])
    if value.shape[1] == 1:
        return float(value[row, 0])
    shifted = column - (call.shape[1] - value.shape[1])
    return float(value[row, shifted]) if shifted >= 0 else None


def exp_difference(numerator, denominator):
    """exp(a - b) within e^+-80; None where one is not recorded, NaN where one is NaN."""
    if numerator is None or denominator is None:
        return None
    return (
        math.exp(min(max(numerator - denominator, -80.0), 80.0))
        if numerator == numerator and denominator == denominator
        else math.nan
    )


def boost(call, row, column):
    """A token's |dLoss/dlogp| over the median of its sequence: above 1 the loss weighs it more than its neighbours."""
    if "logps" not in call.weights:
        return None
    weights = call.weights["logps"][row][call.mask[row]].abs()
    median = float(weights.median()) if len(weights) else 0.0
    return float(call.weights["logps"][row, column].abs()) / median if median > 0 else None


def log_rho(call):
    """(N,) mean over counted tokens of log omega; None without rollout log-probs."""
    rollout = call.extras.get("rollout_logps")
    if rollout is None or rollout.dim() != 2:
        return None
    t = rollout.shape[1]
    mask, logps = call.mask[:, -t:], call.outputs["logps"][:, -t:]
    difference = torch.where(mask, logps.double() - rollout.double(), 0.0)
    return difference.sum(1) / mask.sum(1).clamp(min=1)


def rho_of(call, row):
    """exp of `log_rho` for one sequence."""
    value = log_rho(call)
    return None if value is None else math.exp(min(max(float(value[row]), -80.0), 80.0))


def log_rho_z(calls):
    """{(call, row): robust deviations of log rho from the median over this rank's sequences}."""
    values = {}
    for index, call in enumerate(calls):
        of_call = log_rho(call)
        if of_call is not None:
            counted = call.mask.any(1)
            values |= {(index, i): float(x) for i, x in enumerate(of_call) if counted[i] and math.isfinite(x)}
    if len(values) < 4:
        return {}
    middle = statistics.median(values.values())
    spread = 1.4826 * statistics.median(abs(x - middle) for x in values.values())
    return {key: abs(x - middle) / max(spread, 1e-6) for key, x in values.items()}


def prompt_ids(call, row):
    """Token ids of a sequence's prompt without padding; None where the batch does not hold them."""
    batch = call.batch
    if not isinstance(batch, Mapping):
        return None
    if isinstance(batch.get("prompt_ids"), torch.Tensor):
        ids, mask = batch["prompt_ids"][row], batch.get("prompt_mask")
    elif isinstance(batch.get("input_ids"), torch.Tensor) and call.ids is not None:
        columns = call.mask[row].nonzero().squeeze(1)
        width = batch["input_ids"].shape[1]
        end = width - call.shape[1] + (int(columns[0]) if len(columns) else 0)
        ids, mask = batch["input_ids"][row, :end], batch.get("attention_mask")
    else:
        return None
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        ids = ids[mask[row, : len(ids)] != 0]
    return ids.tolist()


def prompt_id(call, row):
    """Short hash of the prompt's tokens: the same prompt has the same id in every step and run."""
    ids = prompt_ids(call, row)
    return None if not ids else hashlib.sha256(str(ids).encode()).hexdigest()[:12]
