"""Sampling-mask replay: the record of an engine, the masked softmax and its gradient, and the replay end to end."""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from test_minirl import K, L, moe  # noqa: F401  (fixture)
from test_rollout import MIXES, engine_of, make_prompts, processed_logps, qwen3
from trl.trainer import utils as trl_utils
from trl.trainer.utils import add_fused_lm_head

from grpo_tokenclip import GRPOTokenClipTrainer
from rlvr_common import RLVRConfig
from rollout import Rollout
from support import (
    check_support,
    collect_support,
    drop_rows,
    join_support,
    replay_support,
    support_bytes_per_token,
    support_logps,
)
from training import equal, history, make_minirl, make_ours, weights

TRUNCATED = [mix for mix in MIXES if set(mix) - {"temperature"}]


def random_support(n, t, v, seed=0, empty=0.0):
    """Entries with 1 to v ids a row, the sampled id among them. -> (support, ids (n, t))."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, v, (n, t), generator=g)
    support = []
    for i in range(n):
        rows = []
        for j in range(t):
            others = torch.randperm(v, generator=g)[: int(torch.randint(1, v, (), generator=g))]
            row = torch.cat([ids[i, j : j + 1], others[others != ids[i, j]]])
            rows.append(row[:0] if torch.rand((), generator=g) < empty else row[torch.randperm(len(row), generator=g)])
        offsets = torch.tensor([0, *map(len, rows)]).cumsum(0).to(torch.int32)
        support.append((torch.cat(rows).to(torch.int32), offsets))
    return support, ids


def dense_logps(logits, ids, support):
    """The definition, position by position: a softmax over a dense mask."""
    rows = []
    for i, (kept, offsets) in enumerate(support):
        for t in range(ids.shape[1]):
            chosen = kept[offsets[t] : offsets[t + 1]].long()
            mask = torch.full_like(logits[i, t], -math.inf)
            mask[chosen if len(chosen) else slice(None)] = 0.0
            rows.append((logits[i, t] + mask).log_softmax(-1)[ids[i, t]])
    return torch.stack(rows).view(ids.shape)


# --- the record -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mix", TRUNCATED, ids=str)
@pytest.mark.parametrize("batch_size", [None, 3])
def test_the_record_is_what_the_filters_leave(mix, batch_size):
    engine = engine_of(qwen3(), eos=[1, 2, 3, 4], seed=3, record_support=True)
    result = engine.generate(make_prompts(8), 14, batch_size=batch_size, **mix)
    plain = engine_of(qwen3(), eos=[1, 2, 3, 4], seed=3).generate(make_prompts(8), 14, batch_size=batch_size, **mix)
    assert (
        plain.completion_ids == result.completion_ids and plain.support is None
    )  # recording does not touch the sample
    check_support(result.support, result.completion_ids)
    model, heat = engine.model.double(), {"temperature": mix.get("temperature", 1.0)}
    several = 0
    for i, (prompt, tokens) in enumerate(zip(result.prompt_ids, result.completion_ids, strict=True)):
        ids, offsets = result.support[i]
        assert ids.dtype == offsets.dtype == torch.int32 and len(offsets) == len(tokens) + 1
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].tolist()
        for t, row in enumerate(logits):
            wanted = {j for j, logp in enumerate(processed_logps(row, **mix)) if logp > -math.inf}
            assert set(ids[offsets[t] : offsets[t + 1]].tolist()) == wanted
            mass = math.fsum(math.exp(processed_logps(row, **heat)[j]) for j in wanted)
            assert result.kept_mass[i][t] == pytest.approx(mass, abs=1e-5)
            several += len(wanted) > 1
    assert several or mix == {"top_k": 1}


def test_without_truncation_there_is_nothing_to_record():
    engine = engine_of(qwen3(), record_support=True)
    assert engine.generate(make_prompts(2), 4, temperature=0.7).support is None
    assert engine.generate(make_prompts(2), 4, temperature=0.0, top_k=5).support is None  # greedy: no filter applies


def test_collected_rows_follow_their_sequences_when_the_batch_shrinks():
    steps = [
        (torch.tensor([0, 1, 2]), torch.tensor([1, 2, 1]), torch.tensor([10, 20, 21, 30])),
        (torch.tensor([0, 2]), torch.tensor([2, 1]), torch.tensor([11, 12, 31])),
        (torch.tensor([2]), torch.tensor([1]), torch.tensor([32])),
    ]
    (a, a_off), (b, b_off), (c, c_off) = collect_support(steps, [2, 1, 3])
    assert (a.tolist(), a_off.tolist()) == ([10, 11, 12], [0, 1, 3])
    assert (b.tolist(), b_off.tolist()) == ([20, 21], [0, 2])
    assert (c.tolist(), c_off.tolist()) == ([30, 31, 32], [0, 1, 2, 3])
    (a, a_off), *_ = collect_support(steps, [1, 1, 2])  # a sequence that ended before the engine noticed
    assert (a.tolist(), a_off.tolist()) == ([10], [0, 1])


def test_a_record_of_another_sample_is_refused():
    support, ids = random_support(3, 4, 9)
    tokens = ids.tolist()
    check_support(support, tokens)
    with pytest.raises(ValueError, match="support of 2 sequences for 3"):
        check_support(support[:2], tokens)
    with pytest.raises(ValueError, match="sequence 1 has 4 rows and .* for 3 tokens"):
        check_support(support, [tokens[0], tokens[1][:3], tokens[2]])
    kept, offsets = support[2]
    place = int(offsets[1]) + kept[offsets[1] : offsets[2]].tolist().index(tokens[2][1])
    kept = kept.clone()
    kept[place] = 99
    with pytest.raises(
        ValueError, match=f"token {tokens[2][1]} at sequence 2, position 1 is not in its recorded support"
    ):
        check_support([*support[:2], (kept, offsets)], tokens)
    check_support([drop_rows(support[0], torch.tensor([1, 0, 1, 0]))], tokens[:1])  # empty rows are no fault


def test_rows_of_tool_tokens_are_emptied_and_the_others_stay():
    (entry,), _ = random_support(1, 4, 9)
    ids, offsets = drop_rows(entry, torch.tensor([1, 0, 1, 1, 1]))  # padded beyond the sequence
    sizes = entry[1].diff().tolist()
    assert offsets.diff().tolist() == [sizes[0], 0, *sizes[2:]] and offsets.dtype == torch.int32
    assert ids[: sizes[0]].tolist() == entry[0][: sizes[0]].tolist()
    assert ids[sizes[0] :].tolist() == entry[0][sizes[0] + sizes[1] :].tolist()


def test_bytes_are_those_stored():
    support, _ = random_support(2, 5, 20)
    ids = sum(len(kept) for kept, _ in support)
    assert support_bytes_per_token(support) == pytest.approx(4 * (ids + 2 * 6) / 10)


# --- the softmax over it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_support_logps_is_the_dense_masked_softmax_with_its_gradient(dtype):
    support, ids = random_support(3, 5, 11, empty=0.3)
    logits = (4 * torch.randn(3, 5, 11, generator=torch.Generator().manual_seed(1))).to(dtype)
    a, b = (logits.clone().requires_grad_() for _ in range(2))
    weight = torch.randn(3, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ours, wanted = support_logps(a, ids, join_support(support, 5)), dense_logps(b.double(), ids, support)
    tolerance = 1e-6 if dtype != torch.bfloat16 else 2e-2
    torch.testing.assert_close(ours.double(), wanted, atol=1e-6, rtol=1e-6)
    (ours * weight).sum().backward()
    (wanted * weight).sum().backward()
    torch.testing.assert_close(a.grad.double(), b.grad.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("head", ["tied", "bias-softcap-scale"])
@pytest.mark.parametrize("compact", [False, True])
def test_the_fused_head_under_replay_is_the_dense_masked_softmax(head, compact, monkeypatch):
    """Values, gradients of every weight, kept mass and entropy; in the layout of CPUs and in the compacted one of GPUs."""
    model = qwen3()
    if head != "tied":
        model.lm_head = torch.nn.Linear(32, 100)
        model.config.tie_word_embeddings = False
        model.config.final_logit_softcapping, model.config.logit_scale = 20.0, 1.5
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    if compact:
        monkeypatch.setattr(trl_utils, "_use_triton", lambda device: True)
    n, prompt, t = 3, 4, 6
    ids = torch.randint(2, 100, (n, prompt + t), generator=torch.Generator().manual_seed(0))
    attention = torch.ones_like(ids)
    attention[1, -2:] = 0  # a shorter completion
    support, chosen = random_support(n, t, 100, seed=4)
    ids[:, prompt:] = chosen
    support[1] = (support[1][0][: support[1][1][t - 2]], support[1][1][: t - 1])
    labels = ids.masked_fill(attention == 0, -100)
    labels[:, :prompt] = -100
    mask = attention[:, 1:].bool()
    mask[:, : prompt - 1] = False

    with replay_support(support, mask, prompt - 1) as replay:
        out = model(input_ids=ids, attention_mask=attention, labels=labels, fused_lm_head=True)
    scored = mask[:, prompt - 1 :]
    out.log_probs[:, prompt - 1 :][scored].sum().backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert replay.replayed == int(scored.sum()) == n * t - 2
    model.zero_grad()

    hidden = model.model(input_ids=ids, attention_mask=attention).last_hidden_state[:, prompt - 1 : -1]
    logits = model.lm_head(hidden)
    if head != "tied":
        logits = 20.0 * torch.tanh(1.5 * logits / 20.0)
    logits = logits / 0.7
    padded = [*support[:1], (support[1][0], torch.cat([support[1][1], support[1][1][-1:].expand(2)])), *support[2:]]
    wanted = dense_logps(logits, chosen, padded)
    torch.testing.assert_close(out.log_probs[:, prompt - 1 :][scored], wanted[scored], atol=1e-6, rtol=1e-5)
    wanted[scored].sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(ours[name], p.grad, atol=2e-5, rtol=1e-4)
    full = logits.log_softmax(-1)
    mass = torch.stack([
        full[i, j, kept[offsets[j] : offsets[j + 1]].long()].logsumexp(0)
        for i, (kept, offsets) in enumerate(padded) for j in range(t)
    ]).view(n, t)  # fmt: skip
    torch.testing.assert_close(replay.kept[:, prompt - 1 :][scored], mass.detach()[scored], atol=1e-5, rtol=1e-5)
    entropy = -(full.exp() * full).sum(-1)
    torch.testing.assert_close(out.entropy[:, prompt - 1 :][scored], entropy.detach()[scored], atol=1e-5, rtol=1e-5)


def test_outside_of_the_context_the_head_is_trls_and_a_replay_that_never_ran_is_an_error():
    kernel = trl_utils._ChunkedLogProbFunction
    support, _ = random_support(1, 2, 9)
    with pytest.raises(RuntimeError, match="the head never ran"):
        with replay_support(support, torch.ones(1, 2), 0):
            assert trl_utils._ChunkedLogProbFunction is not kernel
    with pytest.raises(KeyError):
        with replay_support(support, torch.ones(1, 2), 0):
            raise KeyError
    assert trl_utils._ChunkedLogProbFunction is kernel


# --- training under truncation ----------------------------------------------------------------------------------------


class Watched(GRPOTokenClipTrainer):
    def score(self, model, inputs):
        scored = super().score(model, inputs)
        self.seen = [*getattr(self, "seen", []), SimpleNamespace(inputs=inputs, batch=scored)]
        return scored


def trained(folder, **changes):
    trainer = make_ours(folder, max_completion_length=16, per_device_train_batch_size=8, **changes)
    trainer.__class__ = Watched
    trainer.train()
    return trainer


LESS = [{"top_p": 0.6}, {"top_k": 2}, {"min_p": 0.3}, {"top_k": 8, "top_p": 0.7, "min_p": 0.02, "temperature": 1.3}]


@pytest.mark.parametrize("mix", LESS, ids=str)
def test_equal_weights_give_mismatch_one_with_the_mask_and_the_kept_mass_without(tmp_path, mix):
    kept = trained(tmp_path / "kept", max_steps=1, keep_sampling_mask=True, **mix)
    with pytest.warns(UserWarning, match="expect a mismatch pi_old/mu of 0") as said:
        bare = trained(tmp_path / "bare", max_steps=1, **mix)
    record, biased = kept.state.log_history[0], bare.state.log_history[0]
    (mass,) = kept._metrics["train"]["support/rollout_kept_mass"] or [record["support/rollout_kept_mass"]]
    assert mass < 0.99  # the filters bite: the comparison says something
    assert record["mismatch/mean"] == pytest.approx(1.0, abs=1e-5) and abs(record["mismatch/k1"]) < 1e-5
    assert biased["mismatch/mean"] == pytest.approx(mass, abs=1e-5)
    assert record["support/agreement"] == pytest.approx(1.0, abs=1e-5)
    assert record["support/kept_mass"] == pytest.approx(mass, abs=1e-5) and record["support/replayed_frac"] == 1
    assert f"of {mass:.3f} instead of 1" in str(next(w.message for w in said if "expect" in str(w.message)))


OFF_POLICY = {"steps_per_generation": 2, "beta": 0.1, "top_k": 3, "keep_sampling_mask": True, "learning_rate": 1e-2}


def test_policy_old_and_reference_share_the_set_through_shuffle_and_split(tmp_path):
    """Every log-prob that the loss sees is that of a softmax over the recorded set, under the weights it claims."""
    trainer = trained(tmp_path, max_steps=2, **OFF_POLICY)
    reference = trainer.ref_model
    for seen in trainer.seen:
        inputs, batch = seen.inputs, seen.batch
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        width = inputs["completion_ids"].shape[1]
        with torch.no_grad():
            logits = reference(input_ids=ids, attention_mask=attention).logits[:, -width - 1 : -1]
        joined = join_support(inputs["support"], width)
        scored = batch.mask.bool()
        # sampled with the initial weights, which are the reference's: mu, pi_old and pi_ref are one distribution
        wanted = support_logps(logits, torch.where(scored, inputs["completion_ids"], 0), joined)
        for logps in (batch.ref_logps, batch.old_logps, batch.rollout_logps):
            torch.testing.assert_close(logps[scored], wanted[scored], atol=1e-5, rtol=1e-4)
    moved = (trainer.seen[1].batch.logps - trainer.seen[1].batch.old_logps).abs().max()
    assert moved > 1e-3  # the second update is off-policy
    assert history(trainer, "kl")[1][0] > 0


def test_lora_moe_routing_replay_and_accumulation_keep_the_mask(tmp_path, moe):  # noqa: F811
    changes = {"top_k": 4, "keep_sampling_mask": True, "max_steps": 2, "num_minibatches": 2, "routing_replay": "r3"}
    trainer = make_minirl(
        tmp_path / "moe", moe, gradient_accumulation_steps=2, per_device_train_batch_size=4,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), **changes,
    )  # fmt: skip
    trainer.train()
    record = trainer.state.log_history[0]
    assert record["mismatch/mean"] == pytest.approx(1.0, abs=1e-4) and record["support/rollout_kept_mass"] < 0.9
    assert record["routing/replayed_rows"] > 0 and record["support/size"] >= 4


def test_micro_batches_and_the_mask(tmp_path):
    runs = []
    for per_device, accumulation in ((8, 1), (2, 4)):
        trainer = make_ours(
            tmp_path / str(accumulation), max_steps=2, max_completion_length=16, top_p=0.7, keep_sampling_mask=True,
            per_device_train_batch_size=per_device, gradient_accumulation_steps=accumulation, optim="sgd",
            learning_rate=0.5, max_grad_norm=0.0,
        )  # fmt: skip
        trainer.train()
        runs.append(history(trainer, "loss", "grad_norm"))
    assert runs[0][0][1] > 1e-3
    for x, y in zip(*runs, strict=True):
        assert x == pytest.approx(y, abs=2e-6, rel=2e-5)


def test_resume_carries_the_buffered_sets(tmp_path):
    changes = OFF_POLICY | {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "max_completion_length": 12}
    whole = make_ours(tmp_path / "a", **changes)
    whole.train()
    rest = make_ours(tmp_path / "a", **changes)
    rest.train(resume_from_checkpoint=str(tmp_path / "a/checkpoint-1"))
    assert equal(weights(whole), weights(rest))


def test_gradloc_looks_through_the_mask(tmp_path):
    trainer = make_ours(
        tmp_path,
        max_steps=2,
        top_k=3,
        keep_sampling_mask=True,
        gradloc="directional",
        gradloc_every=1,
        steps_per_generation=2,
    )
    trainer.train()
    assert all(r["gradloc/certificate"] < 0.05 for r in trainer.state.log_history if "gradloc/certificate" in r)
    assert trainer.state.log_history[0]["gradloc/certificate"] > 0  # directional: not a fall-back to search


def test_a_replaced_rollout_without_sets_is_an_error(tmp_path):
    trainer = make_ours(tmp_path, max_steps=1, top_k=3, keep_sampling_mask=True)
    trainer._take_support = lambda rollout: None
    with pytest.raises(RuntimeError, match="the batch carries no support"):
        trainer.train()


def test_an_engine_that_does_not_tell_the_kept_mass_is_warned_of_too(tmp_path):
    trainer = make_ours(tmp_path, top_p=0.9)
    for _ in range(2):  # said once
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            trainer._take_support(Rollout([[1]], [[2]], [[-0.5]], [True], [0]))
    assert not seen and trainer._warned_of_truncation
    trainer._warned_of_truncation = False
    with pytest.warns(
        UserWarning, match="below 1, the mass that was kept, which the server does not tell, from equal weights"
    ):
        trainer._take_support(Rollout([[1]], [[2]], [[-0.5]], [True], [0]))


def test_untruncated_runs_neither_warn_nor_log_sets(tmp_path):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer = make_ours(tmp_path, max_steps=1)
        trainer.train()
    assert not any("probability mass" in str(w.message) for w in seen)
    assert not any(name.startswith("support/") for name in trainer.state.log_history[0])
    with pytest.raises(ValueError, match="use_vllm carry no sampling mask"):
        RLVRConfig(str(tmp_path), use_vllm=True, top_k=5, keep_sampling_mask=True)
