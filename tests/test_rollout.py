"""rollout.py against float64 recomputation, `generate`, PEFT's own merge, exact probabilities, and planted faults."""

import contextlib
import copy
import math
import random
import sys
import types

import pytest
import torch
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import (
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from trl.trainer.utils import add_fused_lm_head

import rollout
from rollout import Rollout, TransformersEngine
from routing import place_routes, record_routing, recorded_rows, replay_routing

VOCAB, PAD, EOS = 100, 0, 1
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,  # far from uniform, so that filters, masks and precision matter
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}


def qwen3(seed=0, **overrides):
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "tie_word_embeddings": True, **overrides}))


def qwen3_moe(seed=0):
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **MOE, tie_word_embeddings=False))


def engine_of(model, **options):
    return TransformersEngine(model, options.pop("eos", EOS), PAD, **options)


def make_prompts(n, seed=0, shortest=3, longest=12):
    rng = random.Random(seed)
    return [[rng.randrange(2, VOCAB) for _ in range(rng.randint(shortest, longest))] for _ in range(n)]


def weights_of(engine):
    return {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}


def step_optimizer(model, lr=1e-3):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    model(input_ids=torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


# ---------------------------------------------------------------- references


def processed_logps(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """One position, plain Python floats: log-probs after temperature, top-k, top-p, min-p; -inf where removed."""
    scores = [x / temperature for x in logits]
    if top_k:
        floor = sorted(scores, reverse=True)[min(top_k, len(scores)) - 1]
        scores = [x if x >= floor else -math.inf for x in scores]

    def probabilities():
        high = max(scores)
        mass = [math.exp(x - high) for x in scores]
        return [m / math.fsum(mass) for m in mass]

    if top_p < 1:
        probs, kept, total = probabilities(), set(), 0.0
        for token in sorted(range(len(probs)), key=lambda i: -probs[i]):
            if total >= top_p:
                break
            kept.add(token)
            total += probs[token]
        scores = [x if i in kept else -math.inf for i, x in enumerate(scores)]
    if min_p:
        probs = probabilities()
        scores = [x if p >= min_p * max(probs) else -math.inf for x, p in zip(scores, probs, strict=True)]
    return [math.log(p) if p > 0 else -math.inf for p in probabilities()]


@torch.no_grad()
def teacher_forced(engine, result, **sampling):
    """log mu recomputed one sequence at a time in float64: no padding, no cache, no batch."""
    model = copy.deepcopy(engine.model).double()
    if isinstance(model, Qwen3MoeForCausalLM):
        model.set_experts_implementation("eager")  # the grouped kernel has no float64
    rows = []
    for prompt, completion in zip(result.prompt_ids, result.completion_ids, strict=True):
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].tolist()
        rows.append([processed_logps(x, **sampling)[token] for x, token in zip(logits, completion, strict=True)])
    return rows


def flat(rows):
    return [value for row in rows for value in row]


# ---------------------------------------------------------------- sampling

MIXES = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"top_k": 1},
]


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_logps_are_those_of_the_processed_distribution(mix):
    engine = engine_of(qwen3(), eos=[1, 2, 3, 4], seed=3)
    result = engine.generate(make_prompts(12), 20, **mix)
    assert flat(result.rollout_logps) == pytest.approx(flat(teacher_forced(engine, result, **mix)), abs=1e-5)
    assert len({len(c) for c in result.completion_ids}) > 1 or mix == {"top_k": 1}  # ragged, so compaction took part


@pytest.mark.parametrize("build", [qwen3_moe, lambda: qwen3(attn_implementation="eager")], ids=["moe", "eager"])
def test_logps_on_other_models(build):
    engine = engine_of(build(), seed=1)
    result = engine.generate(make_prompts(6), 12, temperature=0.9)
    wanted = flat(teacher_forced(engine, result, temperature=0.9))
    assert flat(result.rollout_logps) == pytest.approx(wanted, abs=1e-5)


def test_logps_with_a_sliding_window():
    torch.manual_seed(0)
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    sizes = {k: v for k, v in SIZES.items() if k != "head_dim"}
    engine = engine_of(Qwen2ForCausalLM(Qwen2Config(**sizes, **window)), seed=1)
    assert engine.model.config.layer_types == ["full_attention", "sliding_attention"]
    result = engine.generate(make_prompts(6), 12)
    assert flat(result.rollout_logps) == pytest.approx(flat(teacher_forced(engine, result)), abs=1e-5)


def test_logps_belong_to_the_rounded_weights():
    engine = engine_of(qwen3(), rollout_dtype="int8", seed=2)
    result = engine.generate(make_prompts(6), 12)
    assert flat(result.rollout_logps) == pytest.approx(flat(teacher_forced(engine, result)), abs=1e-5)


def test_greedy_is_that_of_generate_and_its_logp_is_raw():
    model, prompts = qwen3().eval(), make_prompts(8)
    engine = engine_of(model)
    result = engine.generate(prompts, 24, temperature=0.0, top_k=3, top_p=0.5)
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    whole = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=24, do_sample=False)[:, width:].tolist()
    assert result.completion_ids == [row[: row.index(EOS) + 1] if EOS in row else row for row in whole]
    assert flat(result.rollout_logps) == pytest.approx(flat(teacher_forced(engine, result)), abs=1e-5)


@pytest.mark.parametrize("mix", [{}, {"temperature": 0.7, "top_k": 12, "min_p": 0.02}], ids=str)
def test_frequencies_follow_the_probabilities(mix):
    """Chi-square over the first token and, given the commonest first token, over the second."""
    engine, prompt, n = engine_of(qwen3(initializer_range=0.08), seed=5), [9, 8, 7], 10000
    pairs = [tuple(c) for c in engine.generate([prompt] * n, 2, **mix).completion_ids]

    def check(tokens, context):
        with torch.no_grad():
            logits = copy.deepcopy(engine.model).double()(input_ids=torch.tensor([context])).logits[0, -1].tolist()
        probs = [math.exp(x) for x in processed_logps(logits, **mix)]
        counts = [tokens.count(token) for token in range(VOCAB)]
        assert all(count == 0 for count, p in zip(counts, probs, strict=True) if p == 0)
        common = [(c, len(tokens) * p) for c, p in zip(counts, probs, strict=True) if len(tokens) * p >= 5]
        statistic, freedom = sum((c - e) ** 2 / e for c, e in common), len(common) - 1
        assert freedom > 5
        assert statistic < freedom + 4 * math.sqrt(2 * freedom), (statistic, freedom)  # 4 sigma above its mean

    check([pair[0] for pair in pairs], prompt)
    commonest = max(set(range(2, VOCAB)), key=[pair[0] for pair in pairs].count)
    check([pair[1] for pair in pairs if pair[0] == commonest], [*prompt, commonest])


def test_pick_never_leaves_the_support():
    logits = torch.tensor([[-math.inf, 1.0, 2.0, -math.inf]])
    for dtype in (torch.float32, torch.float64):
        for value, token in ((0.0, 1), (1 - torch.finfo(dtype).eps, 2), (1.0, 2)):
            picked, logp = rollout._pick(logits, lambda _, x: x, torch.tensor([value], dtype=dtype))
            assert picked.item() == token
            assert logp.item() == pytest.approx(token - math.log(math.exp(1) + math.exp(2)), abs=1e-6)


def test_batching_and_compaction_do_not_change_a_sequence():
    model, prompts = qwen3(), make_prompts(6) * 2
    usual, never, at_once = (engine_of(model, eos=[1, 2, 3, 4], seed=7) for _ in range(3))
    never.compact_share, at_once.compact_share = 2.0, 1e-9
    wanted = usual.generate(prompts, 25, top_p=0.95)
    assert 3 < sum(wanted.finished) < 12
    for engine, batch_size in ((never, None), (at_once, None), (usual, 5), (never, 1)):
        result = engine.generate(prompts, 25, top_p=0.95, batch_size=batch_size, sequence_ids=range(12))
        assert result.completion_ids == wanted.completion_ids
        assert result.finished == wanted.finished
        assert flat(result.rollout_logps) == pytest.approx(flat(wanted.rollout_logps), abs=1e-5)


def test_left_padding_does_not_leak():
    model, short = qwen3(), [11, 12, 13]
    alone = engine_of(model, seed=2).generate([short], 12)
    beside = engine_of(model, seed=2).generate([short, *make_prompts(5, shortest=9, longest=12)], 12)
    assert beside.completion_ids[0] == alone.completion_ids[0]
    assert beside.rollout_logps[0] == pytest.approx(alone.rollout_logps[0], abs=1e-5)


def test_same_seed_same_result_and_other_seed_other():
    model, prompts = qwen3(), make_prompts(6)
    first, again, other = (engine_of(model, seed=seed).generate(prompts, 12) for seed in (4, 4, 5))
    assert first == again
    assert first.completion_ids != other.completion_ids


def test_a_sequence_is_its_seed_and_id_wherever_it_is_sampled():
    """What two processes sample is what one does, also after a resume and with another limit on tokens."""
    model, prompts = qwen3(), make_prompts(6)
    whole = engine_of(model, seed=4).generate(prompts, 12, sequence_ids=range(10, 16))
    last = engine_of(model, seed=4)
    last.generate(prompts, 5)
    part = last.generate(prompts[4:], 9, sequence_ids=[14, 15])
    assert part.completion_ids == [c[:9] for c in whole.completion_ids[4:]]
    elsewhere = last.generate(prompts, 12, sequence_ids=range(10 + 2**32, 16 + 2**32))
    assert elsewhere.completion_ids != whole.completion_ids
    counted = engine_of(model, seed=4)
    two = counted.generate(prompts, 12).completion_ids, counted.generate(prompts, 12).completion_ids
    assert two[0] != two[1]
    assert two[1] == last.generate(prompts, 12, sequence_ids=range(6, 12)).completion_ids
    for ids in ([1, 2], [1, 1, 2, 3, 4, 5]):
        with pytest.raises(ValueError, match="sequence_ids holds"):
            last.generate(prompts, 12, sequence_ids=ids)


def test_record_is_ragged_and_ends_at_eos_or_the_limit():
    stops, prompts = [1, 17, 40], make_prompts(40)
    engine = engine_of(qwen3(), eos=stops)
    engine.push_weights(qwen3(), version=12)
    result = engine.generate(tuple(map(tuple, prompts)), 9)
    assert result.prompt_ids == prompts and len(result) == 40 and result.version == [12] * 40
    assert result.routes is None and result.support is None
    assert [len(c) for c in result.completion_ids] == [len(x) for x in result.rollout_logps]
    for completion, finished in zip(result.completion_ids, result.finished, strict=True):
        assert not set(completion[:-1]) & set(stops)
        assert finished == (completion[-1] in stops)
        assert finished or len(completion) == 9
    assert {c[-1] for c, f in zip(result.completion_ids, result.finished, strict=True) if f} == set(stops)
    assert 0 < sum(result.finished) < 40
    assert all(isinstance(x, float) and x <= 0 for x in flat(result.rollout_logps))


def test_one_token_is_one_token():
    result = engine_of(qwen3()).generate(make_prompts(3), 1)
    assert [len(c) for c in result.completion_ids] == [1, 1, 1]


def test_finished_rows_and_repeated_prompts_stop_costing():
    engine, prompts = engine_of(qwen3(), eos=list(range(1, 9)), seed=1), make_prompts(6)
    rows = []
    engine.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    result = engine.generate(prompts * 8, 40)
    lengths = [len(c) for c in result.completion_ids]
    assert rows[0] == 6  # each distinct prompt is prefilled once
    needed = sum(length - 1 for length in lengths)
    assert needed <= sum(rows[1:]) <= needed / (1 - engine.compact_share)
    assert len(rows) == max(lengths)
    assert sum(rows[1:]) < 0.6 * 48 * (len(rows) - 1)  # what it would cost to keep them


def test_progress_counts_sequences_to_the_end():
    seen = []
    result = engine_of(qwen3(), eos=[1, 2, 3]).generate(
        make_prompts(9), 25, batch_size=4, on_progress=lambda done, total: seen.append((done, total))
    )
    done = [d for d, _ in seen]
    assert {t for _, t in seen} == {9} and done == sorted(done) and done[-1] == 9
    assert {4, 8} <= set(done) and len(done) > 3 and sum(result.finished) > 2


def test_the_caller_is_left_alone():
    """No global RNG moved, no autocast, default dtype or grad mode leaking in or out."""
    model = qwen3()
    plain = engine_of(model, seed=9).generate(make_prompts(4), 8)
    torch.manual_seed(12345)
    before = torch.get_rng_state(), random.getstate()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = engine_of(model, seed=9).generate(make_prompts(4), 8)
        assert torch.is_grad_enabled()
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert inside == plain
    assert engine_of(model, rollout_dtype="bfloat16").model.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    "change, words",
    [
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": [[5], []]}, "prompt 1 has no token"),
        ({"prompt_ids": [[5] * 200]}, "prompt 0 has 200 tokens.*128 positions"),
        ({"prompt_ids": [[5] * 125]}, "prompt 0 has 125 tokens.*max_new_tokens=4"),
        ({"prompt_ids": [[5], [VOCAB]]}, "prompt 1 holds a token id outside 0..99"),
        ({"prompt_ids": [[-1]]}, "prompt 0 holds a token id outside"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"min_p": 2.0}, "min_p=2.0"),
    ],
    ids=str,
)
def test_bad_input_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        engine_of(qwen3()).generate(**{"prompt_ids": [[5, 6]], "max_new_tokens": 4, **change})


def test_the_longest_admissible_prompt_runs():
    result = engine_of(qwen3()).generate([[5] * 124], 4, top_k=5)
    assert 1 <= len(result.completion_ids[0]) <= 4


def test_bad_construction_is_refused():
    with pytest.raises(ValueError, match="rollout_dtype is 'float16'"):
        engine_of(qwen3(), rollout_dtype="float16")
    with pytest.raises(ValueError, match="eos_token_ids=100"):
        engine_of(qwen3(), eos=100)
    with pytest.raises(ValueError, match="at least one EOS"):
        engine_of(qwen3(), eos=[])
    with pytest.raises(ValueError, match="model is a Linear"):
        engine_of(nn.Linear(2, 2))
    flash = qwen3()
    flash.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2 has no float32"):
        engine_of(flash)


def test_nan_weights_stay_visible():
    model = qwen3()
    engine = engine_of(model)
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    engine.push_weights(model, 1)
    assert all(math.isnan(x) for x in flat(engine.generate([[5, 6]], 3).rollout_logps))


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("tie", [True, False])
def test_push_copies_every_weight_and_shares_none(tie):
    model = qwen3(tie_word_embeddings=tie)
    engine = engine_of(model)
    storages = {t.untyped_storage().data_ptr() for t in model.state_dict().values()}
    assert not storages & {t.untyped_storage().data_ptr() for t in engine.model.state_dict().values()}
    assert (engine.model.lm_head.weight is engine.model.model.embed_tokens.weight) == tie
    newer = qwen3(seed=1, tie_word_embeddings=tie)
    assert engine.push_weights(newer, version=3) == engine.fingerprint and engine.version == 3
    assert weights_of(engine).keys() == newer.state_dict().keys()
    for name, tensor in newer.state_dict().items():
        assert torch.equal(engine.model.state_dict()[name], tensor), name
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(engine.model(input_ids=ids).logits, newer.eval()(input_ids=ids).logits)


def test_the_copy_is_an_inference_model():
    model = qwen3(attention_dropout=0.5, use_cache=False, attn_implementation="eager").train()
    model.gradient_checkpointing_enable()
    engine = engine_of(model)
    assert not engine.model.training and not any(p.requires_grad for p in engine.model.parameters())
    assert engine.model.config.use_cache and not model.config.use_cache
    assert engine.model.config._attn_implementation == "eager"
    assert not engine.model.is_gradient_checkpointing and model.is_gradient_checkpointing and model.training
    assert type(engine.model) is Qwen3ForCausalLM


def test_a_training_config_that_returns_more_does_not_reach_the_copy():
    model, prompts = qwen3_moe(), make_prompts(4)
    plain = engine_of(model).generate(prompts, 4)
    model.config.output_router_logits = model.config.output_hidden_states = True
    engine = engine_of(model)
    assert engine.generate(prompts, 4) == plain
    assert not engine.model(input_ids=torch.tensor([[5]])).hidden_states and model.config.output_router_logits


def test_patches_and_hooks_of_the_training_model_stay_behind():
    model, prompts = qwen3(), make_prompts(3)
    plain = engine_of(model, seed=1).generate(prompts, 6)
    add_fused_lm_head(model, temperature=0.5)
    model.register_forward_hook(lambda *args: pytest.fail("the training model's forward was called"))
    patched = model.forward
    engine = engine_of(model, seed=1)
    engine.push_weights(model, 0)
    assert "forward" not in vars(engine.model) and not engine.model._forward_hooks
    assert engine.generate(prompts, 6) == plain
    assert model.forward is patched


class Wrapper(nn.Module):
    """Names its content like DDP, DeepSpeed's engine and accelerate do."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def regional(model):
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer)
    return model


WRAPS = {
    "ddp": Wrapper,
    "compiled": torch.compile,
    "ddp of compiled": lambda model: Wrapper(torch.compile(model)),
    "compiled ddp": lambda model: torch.compile(Wrapper(model)),
    "compiled layers": regional,
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_push_through_wrappers(wrap):
    model = qwen3(seed=1)
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wrapped = wrap(model)
    for engine in (engine_of(wrapped), engine_of(qwen3())):
        fingerprint = engine.push_weights(wrapped, 1)
        assert all(torch.equal(wanted[name], tensor) for name, tensor in weights_of(engine).items())
        assert fingerprint == engine_of(qwen3(seed=1)).fingerprint


def test_fingerprint_follows_the_weights_and_nothing_else():
    model = qwen3()
    engine = engine_of(model)
    first = engine.fingerprint
    assert engine.push_weights(model, 1) == first
    assert {engine_of(model, rollout_dtype=d, seed=4).fingerprint for d in rollout.ROLLOUT_DTYPES} == {first}
    step_optimizer(model)
    second = engine.push_weights(model, 2)
    assert second != first and engine.push_weights(model, 3) == second


def test_fingerprint_sees_one_bit_swaps_and_buffers():
    model = qwen3()
    engine = engine_of(model)
    seen = {engine.fingerprint}
    weight = model.model.layers[1].mlp.up_proj.weight.data
    for change in (
        lambda: weight[3, 4].copy_(torch.nextafter(weight[3, 4], torch.tensor(9.0))),
        lambda: weight[:2].copy_(weight[:2].flip(0)),  # rows swapped
        lambda: weight[:, :2].copy_(weight[:, :2].flip(1)),  # columns swapped
        lambda: weight[5, :2].copy_(weight[5, :2].flip(0)),  # two cells of one row swapped
        lambda: model.model.norm.weight.data[:2].add_(torch.tensor([0.5, -0.5])),
    ):
        change()
        seen.add(engine.push_weights(model, 1))
    assert len(seen) == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_training_dtype_may_differ(dtype):
    model = qwen3().to(dtype)
    engine = engine_of(model)
    assert engine.model.dtype == torch.float32
    assert torch.equal(engine.model.lm_head.weight, model.lm_head.weight.float())
    frequencies = qwen3().model.rotary_emb.inv_freq  # .to() rounded those of the training model
    assert torch.equal(engine.model.model.rotary_emb.inv_freq, frequencies)


def test_models_that_do_not_match_are_refused_by_name():
    engine = engine_of(qwen3())
    before = weights_of(engine)
    with pytest.raises(ValueError, match=r"unexpected \['model.layers.2.*mlp.up_proj"):
        engine.push_weights(qwen3(num_hidden_layers=3), 1)
    with pytest.raises(ValueError, match=r"missing \['model.layers.1.*unexpected nothing"):
        engine.push_weights(qwen3(num_hidden_layers=1), 1)
    assert engine.version == 0 and all(torch.equal(before[k], v) for k, v in weights_of(engine).items())
    engine.generate([[5]], 2)  # nothing was overwritten
    with pytest.raises(ValueError, match=r"embed_tokens.weight is \(120, 32\).*\(100, 32\)"):
        engine.push_weights(qwen3(vocab_size=120), 1)
    with pytest.raises(ValueError, match="call push_weights before generate"):
        engine.generate([[5]], 2)  # half of a model
    untied = qwen3()
    untied.lm_head.weight = nn.Parameter(untied.lm_head.weight.detach().clone())
    with pytest.raises(ValueError, match="lm_head.weight shares its storage"):
        engine.push_weights(untied, 1)
    assert engine_of(untied).model.config.tie_word_embeddings is False
    integer = qwen3()
    integer.model.norm.weight = nn.Parameter(torch.ones(32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="model.norm.weight is .*int8"):
        engine.push_weights(integer, 1)
    engine.push_weights(qwen3(), 1)
    engine.generate([[5]], 2)


# ---------------------------------------------------------------- PEFT


def with_lora(model, **options):
    options = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.3, **options}
    peft = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
    randomize(peft)
    return peft


def randomize(peft, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


LORA = {
    "linear": lambda: with_lora(qwen3()),
    "untied head": lambda: with_lora(qwen3(tie_word_embeddings=False), modules_to_save=["lm_head"]),
    "tied, own head": lambda: with_lora(qwen3(), modules_to_save=["lm_head"]),
    "bias": lambda: with_lora(qwen3(attention_bias=True), target_modules=["q_proj"], lora_bias=True),
    "rslora": lambda: with_lora(qwen3(), use_rslora=True),
    "experts": lambda: with_lora(
        qwen3_moe(),
        lora_dropout=0.0,
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        target_modules=["q_proj"],
    ),
}


@pytest.mark.parametrize("case", LORA)
def test_lora_is_merged_as_peft_does(case):
    peft = LORA[case]().train()
    before = {name: tensor.clone() for name, tensor in peft.state_dict().items()}
    engine = engine_of(Wrapper(peft))
    assert all(torch.equal(before[name], tensor) for name, tensor in peft.state_dict().items())
    first = engine.fingerprint
    randomize(peft, seed=1)
    assert engine.push_weights(peft, 1) != first
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        live = peft.eval()(input_ids=ids).logits
        merged = copy.deepcopy(peft).merge_and_unload()
        assert merged.state_dict().keys() == weights_of(engine).keys()
        for name, tensor in merged.state_dict().items():
            assert torch.equal(engine.model.state_dict()[name], tensor), name
        torch.testing.assert_close(engine.model(input_ids=ids).logits, live, atol=1e-5, rtol=1e-5)
    assert engine.fingerprint == engine_of(merged).fingerprint


def test_lora_on_a_tied_embedding_unties_the_copy():
    peft = with_lora(qwen3(), target_modules=["embed_tokens", "q_proj"]).eval()
    engine = engine_of(peft)
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(engine.model(input_ids=ids).logits, peft(input_ids=ids).logits, atol=1e-5, rtol=1e-5)


def test_lora_adapters_active_inactive_and_already_merged():
    peft = with_lora(qwen3())
    peft.add_adapter("second", LoraConfig(r=2, target_modules=["k_proj", "q_proj"]))
    randomize(peft, seed=2)
    engine = engine_of(peft)
    ids = torch.tensor([[5, 6, 7, 8]])
    for adapters in (["default"], ["second"], ["default", "second"]):
        peft.base_model.set_adapter(adapters)
        engine.push_weights(peft, 1)
        live = peft.eval()(input_ids=ids).logits
        torch.testing.assert_close(engine.model(input_ids=ids).logits, live, atol=1e-5, rtol=1e-5)
    peft.merge_adapter(["default"])
    engine.push_weights(peft, 1)
    torch.testing.assert_close(engine.model(input_ids=ids).logits, live, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "config, words",
    [
        (LoraConfig(target_modules=["q_proj"], use_dora=True), "q_proj uses the LoRA variant Dora"),
        (LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3]), "embed_tokens is wrapped by PEFT's T"),
        (IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "carries a IA3 adapter"),
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "carries a PROMPT_TUNING adapter"),
    ],
    ids=["dora", "tokens", "ia3", "prompt"],
)
def test_other_adapters_are_refused(config, words):
    with pytest.raises(ValueError, match=words):
        engine_of(get_peft_model(qwen3(), config))


# ---------------------------------------------------------------- routes


@torch.no_grad()
def teacher_forced_routes(engine, result):
    """One sequence at a time, no padding, no cache, no batch, and the last token is not fed."""
    rows = []
    for prompt, completion in zip(result.prompt_ids, result.completion_ids, strict=True):
        with record_routing(engine.model) as recorder:
            engine.model(input_ids=torch.tensor([(prompt + completion)[:-1]]))
        rows.append(recorder.routes[0])
    return rows


@pytest.mark.parametrize("kind", rollout.ROLLOUT_DTYPES)
def test_routes_are_those_of_the_engines_own_copy(kind):
    model, prompts = qwen3_moe(), make_prompts(6) * 2  # repeated prompts are prefilled once
    stops = list(range(1, 7))
    engine = engine_of(model, eos=stops, seed=3, rollout_dtype=kind, record_routes=True)
    result = engine.generate(prompts, 20)
    assert 2 < sum(result.finished) and len({len(c) for c in result.completion_ids}) > 3
    for prompt, completion, routes in zip(result.prompt_ids, result.completion_ids, result.routes, strict=True):
        assert routes.shape == (len(prompt) + len(completion) - 1, 2, 2) and routes.dtype == torch.uint8
        assert recorded_rows(routes).all() and routes.untyped_storage().nbytes() == routes.numel()
    wanted = teacher_forced_routes(engine, result)
    if kind in ("float32", "int8"):
        assert all(torch.equal(a, b) for a, b in zip(result.routes, wanted, strict=True))
    else:  # rounding depends on the shape of a batch, so that close calls may fall otherwise
        same = torch.cat(result.routes) == torch.cat(wanted)
        assert same.float().mean() > 0.97
    plain = engine_of(model, eos=stops, seed=3, rollout_dtype=kind).generate(prompts, 20)
    assert plain == result and plain.routes is None  # recording changes no sample
    if kind in ("fp8", "int8"):  # and they are the copy's, not those of the model in float32
        own = teacher_forced_routes(engine_of(model), result)
        assert (torch.cat(result.routes) == torch.cat(own)).float().mean() < 0.99


def test_routes_survive_compaction_and_batching():
    prompts = make_prompts(5) * 2
    engines = [engine_of(qwen3_moe(), eos=list(range(1, 7)), seed=7, record_routes=True) for _ in range(4)]
    engines[1].compact_share, engines[2].compact_share = 2.0, 1e-9
    wanted = engines[0].generate(prompts, 18)
    assert 3 < sum(wanted.finished)
    for engine, batch_size in zip(engines[1:], (None, None, 3), strict=True):
        result = engine.generate(prompts, 18, batch_size=batch_size)
        assert result.completion_ids == wanted.completion_ids
        assert all(torch.equal(a, b) for a, b in zip(result.routes, wanted.routes, strict=True))
    one = engines[0].generate(prompts, 1)
    assert [len(r) for r in one.routes] == [len(p) for p in prompts]


def test_routes_replay_in_the_training_engine():
    """R3 end to end: with equal engines replay changes no bit, with an fp8 engine it is that engine's choice."""
    model, prompts = qwen3_moe(), make_prompts(5)
    for kind in ("float32", "fp8"):
        result = engine_of(model, eos=list(range(1, 7)), rollout_dtype=kind, record_routes=True).generate(prompts, 12)
        width = max(map(len, prompts)) + 12
        ids, mask = torch.full((5, width), PAD), torch.zeros(5, width, dtype=torch.long)
        for i, (prompt, completion) in enumerate(zip(result.prompt_ids, result.completion_ids, strict=True)):
            start = max(map(len, prompts)) - len(prompt)
            tokens = torch.tensor(prompt + completion)
            ids[i, start : start + len(tokens)], mask[i, start : start + len(tokens)] = tokens, 1
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        routes = place_routes(result.routes, mask)
        assert int(recorded_rows(routes).sum()) == 2 * (int(mask.sum()) - 5)
        with torch.no_grad():
            native = model(**inputs).logits
            with replay_routing(model, routes):
                replayed = model(**inputs).logits
        same = torch.equal(replayed[mask.bool()], native[mask.bool()])
        assert same == (kind == "float32")


def test_a_dense_model_has_no_routes_and_an_unknown_router_is_refused():
    engine = engine_of(qwen3(), record_routes=True)
    assert engine.generate([[5, 6]], 3).routes is None
    granite = GraniteMoeForCausalLM(
        GraniteMoeConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"}, num_local_experts=4)
    )
    engine_of(granite).generate([[5, 6]], 3)
    with pytest.raises(ValueError, match="GraniteMoeTopKRouter is not known"):
        engine_of(granite, record_routes=True)


# ---------------------------------------------------------------- sharded weights


def test_zero3_parameters_are_gathered_before_they_are_read(monkeypatch):
    """A stand-in for DeepSpeed: parameters are empty outside `GatheredParameters`."""
    model, shards, gathered = with_lora(qwen3()), {}, []
    wanted = engine_of(model).fingerprint
    for parameter in model.parameters():
        parameter.ds_id = len(shards)
        shards[parameter.ds_id] = parameter.data

    def scatter(parameters):
        for parameter in parameters:
            parameter.data = torch.empty(0)

    @contextlib.contextmanager
    def gather(parameters):
        parameters = list(parameters)
        gathered.append(len(parameters))
        for parameter in parameters:
            parameter.data = shards[parameter.ds_id]
        yield
        scatter(parameters)

    scatter(model.parameters())
    deepspeed = types.SimpleNamespace(zero=types.SimpleNamespace(GatheredParameters=gather))
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    assert engine_of(model).fingerprint == wanted
    assert all(p.numel() == 0 for p in model.parameters()) and max(gathered) <= 3  # W, A, B: one weight at a time


def fsdp2_worker(rank, store, results):
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    outcome = {}
    cases = {
        "tied": qwen3,
        "untied": lambda: qwen3(tie_word_embeddings=False),
        "lora": LORA["linear"],
        "lora embedding": lambda: with_lora(qwen3(), target_modules=["embed_tokens"]),
        "lora experts": LORA["experts"],
    }
    for name, build in cases.items():
        reference, model = build(), build()
        inner = model.get_base_model() if "lora" in name else model
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in inner.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        if name in ("tied", "untied"):
            model(input_ids=torch.tensor([[5, 6]]))  # leaves the root gathered, in bfloat16
        engine, whole = engine_of(model, seed=1), engine_of(reference, seed=1)
        sharded = sum(type(p).__name__ == "DTensor" for p in model.parameters())
        outcome[name] = (
            engine.fingerprint == whole.fingerprint,
            engine.generate([[5, 6, 7]] * 3, 6) == whole.generate([[5, 6, 7]] * 3, 6),
            type(engine.model) is type(whole.model),
            sharded > 10,
        )
    results[rank] = outcome
    dist.destroy_process_group()


@pytest.mark.slow  # two interpreters start
def test_fsdp2_shards_are_gathered(tmp_path):
    context = torch.multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(fsdp2_worker, (str(tmp_path / "store"), results), nprocs=2)
        assert set(results.keys()) == {0, 1}
        for outcome in results.values():
            assert len(outcome) == 5 and set(outcome.values()) == {(True,) * 4}, outcome


# ---------------------------------------------------------------- precision


def test_fake_quantize_against_loops():
    torch.manual_seed(0)
    x = torch.randn(3, 4, 17)
    x[1, 2] = 0.0
    for kind, top in (("int8", 127.0), ("fp8", 448.0), ("int4", 7.0)):
        got = rollout._fake_quantize(x, kind)
        assert torch.equal(got[1, 2], torch.zeros(17))
        for row, rounded in zip(x.flatten(0, 1).tolist(), got.flatten(0, 1).tolist(), strict=True):
            scale = max(abs(v) for v in row) / top or 1.0
            for value, result in zip(row, rounded, strict=True):
                scaled = value / scale
                if kind != "fp8":
                    allowed = 0.5
                else:  # e4m3: 3 bits of mantissa, smallest normal 2^-6
                    allowed = 2.0 ** (max(math.floor(math.log2(abs(scaled) or 1e-9)), -6) - 4)
                assert abs(result / scale - scaled) <= allowed * (1 + 1e-4)
                assert kind == "fp8" or abs(result / scale - round(result / scale)) < 1e-4
        assert len(got.unique()) > 20
    assert all(len(row.unique()) <= 15 for row in rollout._fake_quantize(x, "int4").flatten(0, 1))  # -7 .. 7


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_which_weights_are_rounded_and_along_which_axis(kind):
    model = qwen3_moe()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[3] = 0.0
        model.model.layers[0].mlp.experts.down_proj[2] = 0.0
    engine = engine_of(model, rollout_dtype=kind)
    for name, weight in model.state_dict().items():
        got = engine.model.state_dict()[name]
        whole = any(part in name for part in ("embed", "norm", "lm_head", "gate.weight"))
        wanted = weight if whole else rollout._fake_quantize(weight, kind)
        assert torch.equal(got, wanted), name
        assert whole or not torch.equal(got, weight), name
    result = engine.generate(make_prompts(4), 6)
    assert all(math.isfinite(x) for x in flat(result.rollout_logps))


def test_fp8_rounds_the_inputs_per_token_and_the_integers_do_not():
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    for kind, wanted in (("fp8", rollout._fake_quantize(x, "fp8")), ("int8", x), ("int4", x)):
        layer = engine_of(qwen3(), rollout_dtype=kind).model.model.layers[0].self_attn.q_proj
        assert torch.equal(layer(x), nn.functional.linear(wanted, layer.weight))
    moe = engine_of(qwen3_moe(), rollout_dtype="fp8").model
    seen = []
    moe.model.layers[0].mlp.experts.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    moe(input_ids=torch.tensor([[5, 6, 7]]))
    assert torch.equal(seen[0], rollout._fake_quantize(seen[0], "fp8"))  # rounding again changes nothing
    head = engine_of(qwen3(), rollout_dtype="fp8").model.lm_head
    assert not head._forward_pre_hooks


def mismatch(model, kind):
    """Mean |log pi - log mu| over sampled tokens, pi in float32."""
    result = engine_of(model, rollout_dtype=kind, seed=0).generate(make_prompts(24), 16)
    trainer = teacher_forced(engine_of(model), result)
    return sum(abs(a - b) for a, b in zip(flat(trainer), flat(result.rollout_logps), strict=True)) / len(flat(trainer))


def test_mismatch_grows_as_precision_falls():
    model = qwen3(initializer_range=0.1)
    size = {kind: mismatch(model, kind) for kind in rollout.ROLLOUT_DTYPES}
    assert size["float32"] < 1e-5 < size["bfloat16"] < size["int8"] < size["fp8"] < size["int4"] < 1, size
    assert size["bfloat16"] > 1e-3 and size["fp8"] > 2 * size["int8"]


def test_bfloat16_keeps_the_rope_frequencies():
    model = qwen3()
    engine = engine_of(model, rollout_dtype="bfloat16")
    assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}
    assert torch.equal(engine.model.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


# ---------------------------------------------------------------- resume, other families


def test_state_continues_the_stream_bit_for_bit():
    model, prompts = qwen3(), make_prompts(5)
    engine = engine_of(model, seed=3)
    engine.generate(prompts, 8)
    step_optimizer(model)
    engine.push_weights(model, 6)
    state = copy.deepcopy(engine.state_dict())
    wanted = [engine.generate(prompts, 8), engine.generate(prompts, 8)]
    fresh = engine_of(model, seed=99)
    fresh.load_state_dict(state)
    assert fresh.version == 6
    assert [fresh.generate(prompts, 8), fresh.generate(prompts, 8)] == wanted
    assert wanted[0].version == [6] * 5 and wanted[0].completion_ids != wanted[1].completion_ids


def test_state_of_other_weights_asks_for_a_push():
    model = qwen3()
    state = engine_of(model).state_dict()
    engine = engine_of(qwen3(seed=1))
    engine.load_state_dict(state)
    with pytest.raises(ValueError, match="call push_weights before generate"):
        engine.generate([[5]], 2)
    engine.push_weights(model, 0)
    assert engine.generate([[5]], 2) == engine_of(model).generate([[5]], 2)
    with pytest.raises(ValueError, match=r"lacks \['fingerprint', 'sampled', 'seed'\]"):
        engine.load_state_dict({"version": 1})


def test_llama_works_too():
    torch.manual_seed(0)
    engine = engine_of(LlamaForCausalLM(LlamaConfig(**SIZES)))
    result = engine.generate(make_prompts(4), 8)
    assert isinstance(result, Rollout)
    assert flat(result.rollout_logps) == pytest.approx(flat(teacher_forced(engine, result)), abs=1e-5)
