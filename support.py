"""Keep sampling mask: record which tokens top-k, top-p and min-p left over, and normalise training over the same ones.

Sampling under truncation draws from mu(a) = pi(a) / Z over the surviving set S, Z = sum_S pi. A trainer that normalises over the
whole vocabulary reads mismatch pi_old/mu = Z < 1 at equal weights, at every token, and a product of those over a
sequence. Filtering the trainer's own logits again is no cure, as its set differs. So the set travels with the sample:

    log pi_theta(a) = z_a - logsumexp_{j in S} z_j                        DeepSeek-V3.2, arXiv:2512.02556, keep sampling mask

One sequence's support is CSR: (ids (nnz,) int32, offsets (T + 1,) int32); row t = the set that token t was drawn from. An empty row
means the full vocabulary. Rows exist for sampled tokens only: prompt and tool tokens have none.

paper: p, k and whether the reference policy is masked are not stated; we: policy, old and reference policy all use the recorded
set, because a KL is defined between distributions over one and the same action space. Entropy stays that of the full
distribution, so that runs with other truncations compare and a collapse shows.
"""

import contextlib
import math

import torch
from trl.trainer import utils as trl_utils

CHUNK = 2**24  # values of gathered head rows in flight: 64 MB in float32


def _float(x):
    return x if x.dtype == torch.float64 else x.float()


# --- the record -------------------------------------------------------------------------------------------------------


def collect_support(steps, lengths):
    """What an engine noted while sampling -> one (ids, offsets) a sequence, on the CPU.

    steps    for each sampling step (rows (b,), sizes (b,), ids (sum of sizes,)): which sequences it served, how many tokens
             survived in each, and which, row by row
    lengths  T_i of each of the N sequences; what was noted after a sequence's end is dropped
    """
    n, t = len(lengths), len(steps)
    device = steps[0][0].device
    sizes = torch.zeros(n, t, dtype=torch.long, device=device)
    for step, (rows, counts, _) in enumerate(steps):
        sizes[rows, step] = counts
    owner = torch.cat([torch.repeat_interleave(rows, counts) for rows, counts, _ in steps])
    ids = torch.cat([kept for _, _, kept in steps]).to(torch.int32)
    ids = ids[owner.argsort(stable=True)].cpu()  # by sequence, steps in order
    ends = sizes.cumsum(1).cpu()
    starts = (ends[:, -1].cumsum(0) - ends[:, -1]).tolist()
    result = []
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), ends[row, :length]]).to(torch.int32)
        result.append((ids[start : start + int(offsets[-1])].clone(), offsets))
    return result


def check_support(support, completion_ids):
    """Raise ValueError unless each sequence has one row a token and every sampled token lies in its (non-empty) row.

    Done once, where the sample arrives: an id outside its own support has log-prob -inf, and its gradient is no number.
    """
    if len(support) != len(completion_ids):
        raise ValueError(
            f"support of {len(support)} sequences for {len(completion_ids)} completions: one each is needed"
        )
    for i, ((ids, offsets), tokens) in enumerate(zip(support, completion_ids, strict=True)):
        if offsets.numel() != len(tokens) + 1 or int(offsets[0]) != 0 or int(offsets[-1]) != ids.numel():
            raise ValueError(
                f"the support of sequence {i} has {offsets.numel() - 1} rows and {ids.numel()} ids for {len(tokens)} tokens: "
                "its offsets must run from 0 to the number of ids, one row a token"
            )
        sizes = offsets.diff().long()
        rows = torch.repeat_interleave(torch.arange(len(tokens)), sizes)
        inside = torch.zeros(len(tokens), dtype=torch.bool)
        inside[rows[ids.long() == torch.as_tensor(tokens).cpu()[rows]]] = True
        bad = (~inside & (sizes > 0)).nonzero()
        if len(bad):
            t = int(bad[0])
            raise ValueError(
                f"sampled token {int(tokens[t])} at sequence {i}, position {t} is not in its recorded support: the record belongs "
                "to another sample"
            )


def drop_rows(entry, keep):
    """The entry with the rows of tokens emptied where keep (T',) is 0 (tool tokens, whatever nobody sampled)."""
    ids, offsets = entry
    sizes = offsets.diff().long()
    keep = keep.bool().cpu()[: len(sizes)]
    kept = torch.repeat_interleave(keep, sizes)
    sizes = torch.where(keep, sizes, 0)
    return ids[kept], torch.cat([offsets.new_zeros(1), sizes.cumsum(0).to(offsets.dtype)])


def join_support(support, width):
    """Entries of N sequences -> (ids (nnz,), offsets (N * width + 1,)), the form `support_logps` reads; width >= every T_i."""
    sizes = torch.zeros(len(support), width, dtype=torch.long)
    for row, (_, offsets) in zip(sizes, support, strict=True):
        row[: offsets.numel() - 1] = offsets.diff()
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), sizes.flatten().cumsum(0)])
    return torch.cat([ids for ids, _ in support]), offsets


def support_bytes_per_token(support):
    """Storage of the record: bytes of ids and offsets over the number of sampled tokens."""
    tokens = sum(offsets.numel() - 1 for _, offsets in support)
    stored = sum(x.numel() * x.element_size() for entry in support for x in entry)
    return stored / max(tokens, 1)


# --- log-probs over it ------------------------------------------------------------------------------------------------


def support_logps(logits, ids, support):
    """Log-probs of `ids` when the softmax runs over the sampled support only (DeepSeek-V3.2, keep sampling mask).

    logits (N, T, V); ids (N, T); support = (token_ids (nnz,), offsets (N*T + 1,)), row-major CSR. -> (N, T) float32.
    An empty row means the full vocabulary. Memory is O(nnz): no dense (N, T, V) mask.
    Raises ValueError where a row does not contain its own sampled id or holds an id twice, or the offsets do not fit.
    """
    token_ids, offsets = (x.to(logits.device).long() for x in support)
    n, t, v = logits.shape
    if offsets.numel() != n * t + 1 or int(offsets[0]) != 0 or int(offsets[-1]) != token_ids.numel():
        raise ValueError(
            f"support offsets must hold {n * t + 1} values from 0 to {token_ids.numel()}, row-major over (N, T)"
        )
    sizes = offsets.diff()
    if (sizes < 0).any() or (token_ids.numel() and (int(token_ids.min()) < 0 or int(token_ids.max()) >= v)):
        raise ValueError(f"support offsets must not fall, and token ids must lie in [0, {v})")
    flat, chosen = logits.reshape(n * t, v), ids.reshape(-1)
    outside = ((chosen < 0) | (chosen >= v)).nonzero()
    if len(outside):
        row = int(outside[0])
        raise ValueError(f"token {int(chosen[row])} at sequence {row // t}, position {row % t} is not in [0, {v})")
    rows = torch.repeat_interleave(torch.arange(n * t, device=logits.device), sizes)
    entries = (rows * v + token_ids).sort().values
    again = (entries[1:] == entries[:-1]).nonzero()
    if len(again):
        row, token = divmod(int(entries[again[0]]), v)
        raise ValueError(
            f"the support at sequence {row // t}, position {row % t} holds token {token} twice: it would count twice"
        )
    own = (token_ids == chosen[rows]).nonzero().squeeze(1)  # (rows with a support,): the place of each sampled id
    inside = torch.zeros(n * t, dtype=torch.bool, device=logits.device)
    inside[rows[own]] = True
    bad = (~inside & (sizes > 0)).nonzero()
    if len(bad):
        row = int(bad[0])
        raise ValueError(
            f"sampled token {int(chosen[row])} at sequence {row // t}, position {row % t} is not in its recorded support"
        )
    kept = _float(flat[rows, token_ids])  # (nnz,)
    logps, _ = _normalised(kept, rows, own, n * t)
    full = (sizes == 0).nonzero().squeeze(1)
    if len(full):
        dense = _float(flat[full]).log_softmax(1).gather(1, chosen[full].unsqueeze(1)).squeeze(1)
        logps = logps.index_copy(0, full, dense)
    return logps.view(n, t)


def _normalised(kept, rows, own, count):
    """kept (nnz,) logits, rows (nnz,) their row, own: places in kept of the sampled ids -> log-softmax over each row at its
    sampled id, and the rows' logsumexp; (count,) twice, 0 and -inf where a row is empty."""
    top = torch.full((count,), -math.inf, device=kept.device, dtype=kept.dtype)
    top = top.scatter_reduce(0, rows, kept.detach(), "amax")
    total = torch.zeros_like(top).index_add(0, rows, (kept - top[rows]).exp())
    at = rows[own]
    # minus the maximum first: the sum of a large maximum and a small logarithm would round at the size of the maximum
    logps = torch.zeros_like(top).index_copy(0, at, kept[own] - top[at] - total[at].log())
    return logps, top + total.detach().log()


class _HeadLogits(torch.autograd.Function):
    """hidden (R, H), weight (V, H) -> (nnz,) float32 logits of chosen (row, id) pairs: O(nnz H) work, no (R, V) matrix."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, rows, ids, dtype):
        ctx.save_for_backward(hidden, weight, bias, rows, ids)
        ctx.dtype = dtype
        out = torch.empty(len(ids), dtype=torch.float32, device=hidden.device)
        for part in _parts(len(ids), hidden.shape[1]):
            out[part] = (_cast(hidden, rows[part], dtype) * _cast(weight, ids[part], dtype)).sum(-1)
        return out if bias is None else out + _cast(bias, ids, dtype)

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, bias, rows, ids = ctx.saved_tensors
        needs = ctx.needs_input_grad
        d_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device) if needs[0] else None
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs[1] else None
        for part in _parts(len(ids), hidden.shape[1]):
            g = grad[part].unsqueeze(1)
            if needs[0]:
                d_hidden.index_add_(0, rows[part], g * _cast(weight, ids[part], ctx.dtype))
            if needs[1]:
                d_weight.index_add_(0, ids[part], g * _cast(hidden, rows[part], ctx.dtype))
        d_bias = None
        if bias is not None and needs[2]:
            d_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device).index_add_(0, ids, grad)
            d_bias = d_bias.to(bias.dtype)
        return (
            None if d_hidden is None else d_hidden.to(hidden.dtype),
            None if d_weight is None else d_weight.to(weight.dtype),
            d_bias, None, None, None,
        )  # fmt: skip


def _parts(count, width):
    size = max(1, CHUNK // width)
    return (slice(start, start + size) for start in range(0, count, size))


def _cast(x, index, dtype):
    return x[index].to(dtype).float()  # rounded as the head's product rounds its factors, summed in float32


class SupportReplay:
    """See `replay_support`. `kept` (n, S - 1): log of the policy's mass on the recorded set, 0 without one."""

    def __init__(self, support, mask, first):
        sizes = torch.zeros(mask.shape, dtype=torch.long)
        for row, (_, offsets) in zip(sizes, support, strict=True):
            length = min(offsets.numel() - 1, mask.shape[1] - first)
            row[first : first + length] = offsets.diff()[:length]
        ids = torch.cat([ids[: int(row.sum())] for (ids, _), row in zip(support, sizes, strict=True)])
        self.mask = mask.bool()
        counted = self.mask.cpu()
        keep = torch.repeat_interleave(counted.flatten(), sizes.flatten())
        self.sizes = torch.where(counted, sizes, 0).flatten().to(mask.device)
        self.ids = ids[keep].long().to(mask.device)
        self.kept = None

    @property
    def replayed(self):
        """Number of tokens whose set was replayed."""
        return 0 if self.kept is None else int((self.sizes > 0).sum())

    def apply(self, hidden, weight, bias, targets, temperature, chunk_size, softcap, scale, outputs):
        """In place of TRL's head kernel, with its arguments and outputs: hidden (R, H), targets (R,), R = all positions or, where
        TRL compacts, those with a label."""
        logps, *rest = self.original.apply(
            hidden, weight, bias, targets, temperature, chunk_size, softcap, scale, outputs
        )
        place = self.mask.flatten().nonzero().squeeze(1)  # scored positions of the grid
        compact = len(hidden) != self.mask.numel()
        sizes = self.sizes[place] if compact else self.sizes
        if len(sizes) != len(hidden):
            raise RuntimeError(
                f"the head got {len(hidden)} positions where the batch has {self.mask.numel()}, {len(place)} of them scored: this "
                "version of TRL lays its head out in another way than the pinned one"
            )
        rows = torch.repeat_interleave(torch.arange(len(hidden), device=hidden.device), sizes)
        low = torch.is_autocast_enabled(hidden.device.type)
        dtype = torch.get_autocast_dtype(hidden.device.type) if low else hidden.dtype
        z = _HeadLogits.apply(hidden, weight, bias, rows, self.ids, dtype) * scale
        if softcap is not None:
            z = softcap * torch.tanh(z / softcap)
        z = z / temperature
        own = (self.ids == targets[rows]).nonzero().squeeze(1)
        masked, total = _normalised(z, rows, own, len(hidden))
        has = sizes > 0
        with torch.no_grad():
            target = torch.zeros_like(total).index_copy(0, rows[own], z[own])
            kept = torch.where(has, total - (target - logps), 0.0)  # target - logps: logsumexp over the vocabulary
            if compact:
                kept = kept.new_zeros(self.mask.numel()).index_copy(0, place, kept)
            self.kept = kept.view(self.mask.shape)
        scored = has if compact else has[place]
        # the full-vocabulary value is left out of the graph where no scored row needs it: its backward is the head's
        return torch.where(has, masked, logps.detach() if bool(scored.all()) else logps), *rest


@contextlib.contextmanager
def replay_support(support, mask, first):
    """Context: forwards of a model with TRL's fused head give log-probs over the recorded sets.

    support  one (ids, offsets) for each of the n sequences of the forward, row t = completion token t
    mask     (n, S - 1) 1 at the positions that are scored, S the length of the padded sequences: position c predicts token c + 1
    first    position that predicts the first completion token

    TRL's head looks its kernel up by name on every call, which is the one seam that leaves its treatment of sharded,
    scaled and capped heads as it is. Raises RuntimeError on exit if no head was called.
    """
    replay = SupportReplay(support, mask, first)
    replay.original = trl_utils._ChunkedLogProbFunction
    trl_utils._ChunkedLogProbFunction = replay
    try:
        yield replay
    finally:
        trl_utils._ChunkedLogProbFunction = replay.original
    if replay.kept is None:
        raise RuntimeError(
            "keep_sampling_mask is on but the head never ran: a compiled model bypasses it, train without torch.compile"
        )
