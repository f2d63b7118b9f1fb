"""The vLLM engine against a server that behaves, one that fails and one that lies; and what servers send, decoded."""

import base64
import copy
import functools
import json
import math
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mock_vllm import RECORDED, MockVLLM, npy_base64
from peft import LoraConfig, get_peft_model
from test_minirl import load, logged

import stability
import vllm_engine
from async_rollout import AsyncEngine, Group
from guard_drills import DropUpdate, events, faulty
from minirl_async_r3 import MiniRLAsyncConfig
from rollout import TransformersEngine
from routing import RoutingShape, moe_layer_numbers
from stability import check_alignment
from stability_report import checklist
from training import MODEL, equal, largest_difference, make_async, make_minirl, options, save_moe, tiny_rows, weights
from vllm_engine import ScoredWeights, ServerGone, VLLMEngine, checkpoint_tensors, copy_weights
from wire_formats import (
    WireError,
    prompt_logps,
    sampled_tokens,
    sampling_support,
    sglang_route_decoder,
    token_versions,
    vllm_route_decoder,
)

# --- wire formats -----------------------------------------------------------------------------------------------------

SHAPE = RoutingShape(layers=3, top_k=2, experts=60)
MOE_LAYERS, LAYERS, TOKENS = [1, 2, 4], 5, 7


def some_routes(tokens=TOKENS, layers=LAYERS, experts=60, seed=0):
    """(tokens - 1, layers, 2), two different experts in each row."""
    pick = np.random.default_rng(seed)
    return np.stack([[pick.permutation(experts)[:2] for _ in range(layers)] for _ in range(tokens - 1)])


def vllm_choice(array):
    return {"routed_experts": npy_base64(array)}


def sglang_choice(array, key="meta_info"):
    return {key: {"routed_experts": base64.b64encode(np.ascontiguousarray(array, "<i4").tobytes()).decode()}}


FORMATS = {
    "vllm-uint8": (vllm_route_decoder, lambda a: vllm_choice(a.astype(np.uint8))),
    "vllm-uint16": (vllm_route_decoder, lambda a: vllm_choice(a.astype(np.uint16))),
    "vllm-int32": (vllm_route_decoder, lambda a: vllm_choice(a.astype(np.int32))),
    "sglang": (sglang_route_decoder, sglang_choice),
    "sglang-openai": (sglang_route_decoder, lambda a: sglang_choice(a, "sgl_ext")),
}


@pytest.mark.parametrize("name", FORMATS)
def test_routes_of_all_layers_become_those_of_the_moe_layers(name):
    make, encode = FORMATS[name]
    routes = some_routes()
    routes[:, [0, 3]] = 0  # dense layers: engines leave zeros there
    decoded = make(SHAPE, MOE_LAYERS, LAYERS)(encode(routes), TOKENS)
    assert decoded.dtype == torch.uint8 and decoded.shape == (TOKENS - 1, 3, 2)
    for t in range(TOKENS - 1):
        for place, layer in enumerate(MOE_LAYERS):
            assert decoded[t, place].tolist() == routes[t, layer].tolist()


def test_routes_of_moe_layers_alone_are_taken_as_they_are():
    routes = some_routes(layers=3)
    decoded = vllm_route_decoder(SHAPE, MOE_LAYERS, LAYERS)(vllm_choice(routes.astype(np.uint8)), TOKENS)
    assert decoded.tolist() == routes.tolist()


def test_many_experts_are_kept_in_two_bytes():
    shape = RoutingShape(3, 2, 256)  # 255 is an expert here and would read as "not recorded" in uint8
    routes = some_routes(experts=256)
    routes[0, 1] = [255, 3]
    decoded = vllm_route_decoder(shape, MOE_LAYERS, LAYERS)(vllm_choice(routes.astype(np.uint8)), TOKENS)
    assert decoded.dtype == torch.int16 and decoded[0, 0].tolist() == [255, 3]


def broken(kind):
    routes = some_routes()
    text = npy_base64(routes.astype(np.uint8))
    raw = base64.b64encode(routes.astype("<i4").tobytes()).decode()
    if kind == "missing":
        return {"routed_experts": None}, {"meta_info": {}}
    if kind == "cut":
        return {"routed_experts": text[: len(text) // 2 // 4 * 4]}, {"meta_info": {"routed_experts": raw[:-8]}}
    if kind == "no base64":
        return {"routed_experts": "%" + text}, {"meta_info": {"routed_experts": "%" + raw}}
    if kind == "no text":
        return {"routed_experts": [1, 2]}, {"meta_info": {"routed_experts": [1, 2]}}
    if kind == "type":
        return vllm_choice(routes.astype(np.float32)), sglang_choice(routes * 1000.0)
    if kind == "a row less":  # off by one: every token would get its neighbour's experts
        return vllm_choice(routes[:-1].astype(np.uint8)), sglang_choice(routes[:-1])
    if kind == "a row more":
        more = some_routes(TOKENS + 1)
        return vllm_choice(more.astype(np.uint8)), sglang_choice(more)
    if kind == "layers":
        return vllm_choice(routes[:, :4].astype(np.uint8)), sglang_choice(routes[:, :4])
    if kind == "top_k":
        wide = np.concatenate([routes, routes[..., :1]], -1)
        return vllm_choice(wide.astype(np.uint8)), sglang_choice(wide)
    if kind == "physical":  # a copy of an expert beyond the logical ids
        routes[2, 4, 1] = 63
        return vllm_choice(routes.astype(np.uint8)), sglang_choice(routes)
    if kind == "negative":
        routes[2, 4, 1] = -1
        return vllm_choice(routes.astype(np.int32)), sglang_choice(routes)
    routes[3, 2] = routes[3, 2, 0]
    return vllm_choice(routes.astype(np.uint8)), sglang_choice(routes)


WORDS = {
    "missing": ("--enable-return-routed-experts", "--enable-return-routed-experts"),
    "cut": ("no .npy file", "holds 234 bytes, no multiple of 40"),
    "no base64": ("is no base64", "is no base64"),
    "no text": ("is a list", "is a list"),
    "type": ("is float32", "names expert"),
    "a row less": ("has 5 rows for 7 tokens: 6 are due", "has 5 rows for 7 tokens: 6 are due"),
    "a row more": ("has 7 rows for 7 tokens: 6 are due", "has 7 rows for 7 tokens: 6 are due"),
    "layers": ("has shape (6, 4, 2): this model needs", "no multiple of 40"),
    "top_k": ("has shape (6, 5, 3)", "has 9 rows for 7 tokens"),
    "physical": ("names expert 63 of a model with 60: logical ids", "names expert 63 of a model with 60: logical ids"),
    "negative": ("names expert -1", "names expert -1"),
    "twice": ("names an expert twice", "names an expert twice"),
}


@pytest.mark.parametrize("kind", WORDS)
def test_routes_that_do_not_fit_are_refused_in_one_sentence(kind):
    for make, choice, words in zip((vllm_route_decoder, sglang_route_decoder), broken(kind), WORDS[kind], strict=True):
        with pytest.raises(WireError) as error:
            make(SHAPE, MOE_LAYERS, LAYERS)(choice, TOKENS)
        assert words in str(error.value) and "\n" not in str(error.value)


def test_sampling_masks_become_one_row_a_token():
    kept, offsets = sampling_support({"sampling_mask": [[5, 9], [], [1]]}, [9, 30, 1], 32)
    assert kept.tolist() == [5, 9, 1] and offsets.tolist() == [0, 2, 2, 3]
    assert kept.dtype == offsets.dtype == torch.int32
    for mask, words in (
        (None, "--return-sampling-mask"),
        ([[5]], "has 1 rows for 2 tokens"),
        ([[5], [6]], "row 1 lacks token 9"),
        ([[5, 99], [9]], "outside the vocabulary"),
        ([[5], 9], "row 1 lacks"),
        ([[5], [9, 7, 9]], "row 1 names a token twice"),
    ):
        with pytest.raises(WireError, match=words):
            sampling_support({"sampling_mask": mask}, [5, 9], 32)


def changed(**changes):
    return copy.deepcopy(RECORDED["choices"][0]) | changes


def entries(*pairs):
    return {"content": [{"token_id": token, "logprob": value} for token, value in pairs]}


def test_a_recorded_answer_is_read():
    choice = changed()
    assert sampled_tokens(choice, 8, 32) == ([17, 9, 2], [-3.98, -0.25, -0.5], True)
    assert sampled_tokens(changed(finish_reason="length"), 3, 32)[2] is False
    assert token_versions(choice, 3) == ["default"] * 3 and token_versions({}, 3) is None
    spans = [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 3}]
    assert token_versions({"weight_versions": spans}, 3) == ["4", "5", "5"]
    scored = [None, {"9": {"logprob": -1.5}, "3": {"logprob": -0.1}}, {"2": {"logprob": -2.5}}]
    assert prompt_logps({"prompt_logprobs": scored}, [17, 9, 2]) == [-1.5, -2.5]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": None}, "no token_ids"),
        ({"token_ids": []}, "has 0 token_ids, 1 to 8"),
        ({"token_ids": list(range(9))}, "has 9 token_ids, 1 to 8"),
        ({"token_ids": [17, 9, 32]}, "outside the vocabulary of 32"),
        ({"token_ids": [17, 9, "2"]}, "outside the vocabulary"),
        ({"logprobs": None}, "no log-probs came for 3 tokens"),
        ({"logprobs": entries((17, -1.0), (9, -1.0))}, "2 log-probs came for 3 tokens"),
        ({"logprobs": entries((17, -1.0), (2, -1.0), (9, -1.0))}, "log-prob 1 is of token 2"),
        ({"logprobs": entries((17, -1.0), (9, None), (2, -1.0))}, "log-prob 1 is None"),
        ({"logprobs": entries((17, -1.0), (9, -9999.0), (2, -1.0))}, "log-prob 1 is -9999.0"),  # NaN or -inf, in vLLM's words
        ({"logprobs": entries((17, -1.0), (9, math.nan), (2, -1.0))}, "log-prob 1 is nan"),
        ({"finish_reason": "error"}, "finish_reason 'error'"),
    ],
)  # fmt: skip
def test_a_damaged_answer_is_refused(changes, words):
    with pytest.raises(WireError, match=words):
        sampled_tokens(changed(**changes), 8, 32)


def test_a_sequence_that_goes_on_after_its_end_is_refused():
    engine = SimpleNamespace(vocabulary=32, eos=[2], decode_routes=None, needs_routes=False, needs_support=False)
    choice = changed(token_ids=[17, 2, 9], logprobs=entries((17, -1.0), (2, -1.0), (9, -1.0)), finish_reason="length")
    with pytest.raises(WireError, match="goes on after its end, token 2"):
        VLLMEngine._decode(engine, [1], choice, 3, 0)


@pytest.mark.parametrize(
    "spans", [[(0, 2)], [(0, 1), (2, 3)], [(1, 3)], [(0, 4)], [(0, 2), (1, 3)], [(0, 1), (2, 4)], [(1, 3), (0, 1)]]
)
def test_weight_versions_must_cover_every_token_once(spans):
    spans = [{"version": "1", "start": start, "end": end} for start, end in spans]
    with pytest.raises(WireError, match="weight_versions"):
        token_versions({"weight_versions": spans}, 3)


def test_a_scored_prompt_must_be_whole():
    for rows in (None, [None, {"9": {"logprob": -1.0}}], [None, {"8": {"logprob": -1.0}}, {"2": {"logprob": -1.0}}]):
        with pytest.raises(WireError, match="prompt log-prob"):
            prompt_logps({"prompt_logprobs": rows}, [17, 9, 2])


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return save_moe(tmp_path_factory.mktemp("moe"))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(vllm_engine, "FIRST_PAUSE_S", 0.01)


def connect(server, model, folder, **options):
    base = {"timeout_s": 20.0, "restart_s": 20.0, "concurrency": 4}
    return VLLMEngine(model, server.url, model.config.eos_token_id, folder, **base | options)


PROMPTS = [[11, 12, 13]] * 3 + [[20, 21]] * 2


def moved(model, factor=1.1):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(factor)
    return model


def own_logps(model, rollout, i):
    prompt, ids = rollout.prompt_ids[i], rollout.completion_ids[i]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1).tolist()


def test_samples_carry_what_the_server_sampled(moe, tmp_path):
    model = load(moe)
    with MockVLLM(moe, routes=True) as server, closing(connect(server, model, tmp_path, needs_routes=True)) as engine:
        rollout = engine.generate(PROMPTS, 6, temperature=1.0, sequence_ids=[4, 5, 6, 7, 8])
        assert rollout.prompt_ids == PROMPTS and rollout.version == [0] * 5
        assert not server.errors
        sent = [body for body in server.bodies if body["sampling_params"].get("n")]
        assert [(b["token_ids"], b["sampling_params"]["n"]) for b in sorted(sent, key=lambda b: len(b["token_ids"]))] == [
            ([20, 21], 2), ([11, 12, 13], 3),
        ]  # fmt: skip
        assert sent[0]["sampling_params"]["stop_token_ids"] == [model.config.eos_token_id]
        assert len({b["sampling_params"]["seed"] for b in sent}) == 2
        for i in range(5):
            assert rollout.rollout_logps[i] == pytest.approx(own_logps(model, rollout, i), abs=1e-4)
            assert rollout.routes[i].shape == (len(PROMPTS[i]) + len(rollout.completion_ids[i]) - 1, 2, 2)
            assert rollout.token_versions[i] == [0] * len(rollout.completion_ids[i])
        assert len({tuple(ids) for ids in rollout.completion_ids[:3]}) > 1  # the n samples of a prompt differ
        (seed,) = (b["sampling_params"]["seed"] for b in sent if b["sampling_params"]["n"] == 3)
        local = TransformersEngine(model, model.config.eos_token_id, model.config.pad_token_id, seed=server.seed)
        inside = local.generate(PROMPTS[:3], 6, temperature=1.0, sequence_ids=[seed, seed + 1, seed + 2])
        assert rollout.completion_ids[:3] == inside.completion_ids  # by index, in whatever order they came
        again = engine.generate(PROMPTS, 6, temperature=1.0, sequence_ids=[4, 5, 6, 7, 8])
        other = engine.generate(PROMPTS, 6, temperature=1.0, sequence_ids=[14, 15, 16, 17, 18])
        assert again.completion_ids == rollout.completion_ids != other.completion_ids
        for bad, words in (
            ([], "at least one prompt"),
            ([[1], []], "at least one"),
            ([[1] * 125], "pass the server's 128"),
        ):
            with pytest.raises(ValueError, match=words):
                engine.generate(bad, 6)


def test_sampling_masks_come_with_the_samples(moe, tmp_path):
    model, cut = load(moe), {"top_k": 5, "top_p": 0.9}
    with MockVLLM(moe, masks=True) as server:
        with closing(connect(server, model, tmp_path / "a", needs_support=True)) as engine:
            rollout = engine.generate(PROMPTS[:3], 6, sequence_ids=[4, 5, 6], **cut)
            with pytest.raises(ValueError, match="top_k is 0: a server that records sampling masks needs a bound"):
                engine.generate(PROMPTS, 6)
            assert engine.describe()["top_k"] == 5 and engine.describe()["top_p"] == 0.9
        seed = next(b["sampling_params"]["seed"] for b in server.bodies if "seed" in b["sampling_params"])
        with pytest.raises(ValueError, match="records sampling masks and so refuses requests without a bounded top_k"):
            connect(server, model, tmp_path / "b")
    pad = model.config.pad_token_id
    local = TransformersEngine(model, model.config.eos_token_id, pad, seed=server.seed, record_support=True)
    inside = local.generate(PROMPTS[:3], 6, sequence_ids=[seed, seed + 1, seed + 2], **cut)
    assert rollout.completion_ids == inside.completion_ids and rollout.kept_mass is None
    assert equal(rollout.support, inside.support) and any(ids.numel() < 5 * 6 for ids, _ in rollout.support)


def test_a_push_arrives_is_labelled_and_has_the_fingerprint_of_every_engine(moe, tmp_path):
    model = load(moe)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with MockVLLM(moe) as server, closing(connect(server, model, tmp_path)) as engine:
        assert equal(dict(model.state_dict()), before)  # the canary's weights are gone again
        local = TransformersEngine(model, model.config.eos_token_id, model.config.pad_token_id)
        assert engine.fingerprint == local.fingerprint
        moved(model)
        assert engine.push_weights(model, 7) == local.push_weights(model, 7)
        pushes = [
            p for p in server.requests if p not in ("/health", "/inference/v1/generate", "/v1/models", "/server_info")
        ]
        order = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]
        assert pushes == ["/resume"] + 3 * order  # canary, version 0, version 7
        rollout = engine.generate(PROMPTS, 6)
        assert rollout.version == [7] * 5
        assert rollout.rollout_logps[0] == pytest.approx(own_logps(model, rollout, 0), abs=1e-4)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["weights-7"]  # older ones are deleted


def test_a_checkpoint_holds_what_transformers_would_save(moe, tmp_path):
    model = load(moe)
    tensors = checkpoint_tensors(copy_weights(model))
    assert any(".experts.0.gate_proj" in name for name in tensors) and "lm_head.weight" not in tensors
    model.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    assert equal(tensors, load_file(tmp_path / "model.safetensors"))


def test_lora_is_pushed_merged(moe, tmp_path):
    model = get_peft_model(load(MODEL), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    with MockVLLM(MODEL) as server:
        engine = VLLMEngine(model, server.url, model.config.eos_token_id, tmp_path, timeout_s=20.0)
        with closing(engine):
            rollout = engine.generate(PROMPTS, 6)
            assert rollout.rollout_logps[0] == pytest.approx(own_logps(model, rollout, 0), abs=1e-3)
            assert rollout.rollout_logps[0] != pytest.approx(own_logps(load(MODEL), rollout, 0), abs=1e-3)


def test_a_server_that_keeps_its_linear_layers_is_caught_before_training(moe, tmp_path):
    with MockVLLM(moe, keeps_linear=True) as server:
        with pytest.raises(
            RuntimeError, match=r"weights canary were pushed .* reports success, but .* some layers keep old"
        ):
            connect(server, load(moe), tmp_path)


def test_a_server_that_stops_following_is_caught_at_the_next_push(moe, tmp_path):
    model = load(moe)
    with MockVLLM(moe) as server, closing(connect(server, model, tmp_path)) as engine:
        server.keeps_linear = True
        with pytest.raises(
            RuntimeError, match=r"weights 1 were pushed .* differ from the new weights' by .*, from the old"
        ):
            engine.push_weights(moved(model), 1)


@pytest.mark.parametrize("lies", [False, True])
def test_a_coarse_server_is_allowed_its_precision_and_no_lie(moe, tmp_path, monkeypatch, lies):
    """The canary moves the probe by 0.51, of which a tenth is allowed; later gaps are measured with the first true push's."""
    monkeypatch.setitem(vllm_engine.PRECISION_GAP, "bfloat16", (0.01, 0.1))
    score = VLLMEngine.score_probe
    monkeypatch.setattr(
        VLLMEngine, "score_probe", lambda self: [s + 0.04 * (-1) ** i for i, s in enumerate(score(self))]
    )
    model = load(moe)
    with MockVLLM(moe, keeps_linear=lies, dtype="torch.bfloat16") as server:
        if lies:
            with pytest.raises(RuntimeError, match=r"weights canary were pushed .* old ones .* differ by 0\.507"):
                connect(server, model, tmp_path)
            return
        with closing(connect(server, model, tmp_path)) as engine:
            assert engine.tolerance == pytest.approx(0.12, abs=1e-3)
            engine.push_weights(moved(model, 1.01), 1)
            server.keeps_linear = True
            with pytest.raises(RuntimeError, match="weights 2 were pushed"):
                engine.push_weights(moved(model, 1.5), 2)


def test_the_proof_in_numbers(moe, tmp_path):
    """The measured case: served -3.98, old weights -4.17, new ones -4.12: nearest to neither."""
    with MockVLLM(moe) as server, closing(connect(server, load(moe), tmp_path, tolerance=0.01)) as engine:
        for served, new, old, fine in (
            (-4.12, -4.12, -4.17, True),
            (-4.125, -4.12, -4.17, True),  # within the precision
            (-3.98, -4.12, -4.17, False),
            (-4.17, -4.12, -4.17, False),  # the old ones
            (-4.12, -4.12, None, True),
            (math.nan, -4.12, -4.17, False),
            (-4.121, -4.12, -4.121, True),  # moved by less than the precision: nothing to tell apart
        ):
            engine.score_probe = lambda served=served: [served] * 3
            engine._probe_before = None if old is None else [old] * 3
            if fine:
                engine._prove([new] * 3, "9")
            else:
                with pytest.raises(RuntimeError, match="weights 9 were pushed"):
                    engine._prove([new] * 3, "9")


@pytest.mark.parametrize(
    ("settings", "needs", "words"),
    [
        ({"dev": False}, {}, ["it takes no weights", "VLLM_SERVER_DEV_MODE=1"]),
        ({"scale_out": False}, {}, ["it takes no token ids", "--enable-scale-out"]),
        ({"logprobs_mode": "raw_logprobs"}, {}, ["its log-probs are raw_logprobs", "--logprobs-mode processed_logprobs"]),
        ({}, {"needs_routes": True}, ["it records no routes", "--enable-return-routed-experts"]),
        ({}, {"needs_support": True}, ["it records no sampling masks", "--return-sampling-mask"]),
        ({"dev": False, "scale_out": False}, {"needs_routes": True}, ["no weights", "no token ids", "no routes"]),
    ],
)  # fmt: skip
def test_what_a_server_lacks_is_named_before_training_in_one_error(moe, tmp_path, settings, needs, words):
    with MockVLLM(moe, **settings) as server, pytest.raises(ValueError) as error:
        connect(server, load(moe), tmp_path, **needs)
    assert "cannot serve this recipe" in str(error.value) and "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words)
    assert "/collective_rpc" not in server.requests


def test_without_a_server_the_error_says_how_to_start_one(moe, tmp_path):
    with MockVLLM(moe) as server:
        pass
    with pytest.raises(ValueError, match=r"no vLLM server answers .*: start one with recipes/serve_vllm.sh"):
        connect(server, load(moe), tmp_path)


def test_a_cache_that_is_not_reset_stops_the_run_or_is_reset_with_force(moe, tmp_path, monkeypatch):
    with MockVLLM(moe, resets=False) as server:  # resets only together with running requests
        connect(server, load(moe), tmp_path).close()
        assert server.requests.count("/reset_prefix_cache") == 4
        monkeypatch.setattr(MockVLLM, "reset_prefix_cache", lambda *a: (200, {"success": False}))
        with pytest.raises(RuntimeError, match="did not reset its prefix cache"):
            connect(server, load(moe), tmp_path)


# --- faults -----------------------------------------------------------------------------------------------------------


def test_half_of_the_answers_lost_changes_nothing(moe, tmp_path):
    prompts = [[i, i + 1] for i in range(10, 22) for _ in range(2)]
    results = []
    for faults in ([], ["drop", "ok", "500", "ok", "garbage", "ok", "cut", "ok", "drop", "drop"]):
        with MockVLLM(moe) as server, closing(connect(server, load(moe), tmp_path)) as engine:
            server.faults.extend(faults)
            results.append(engine.generate(prompts, 5, sequence_ids=range(len(prompts))))
            assert not server.faults and engine.retries == sum(f != "ok" for f in faults) and engine.restarts == 0
    assert results[0] == results[1]


def test_an_answer_that_stays_wrong_ends_in_one_sentence(moe, tmp_path):
    with MockVLLM(moe) as server, closing(connect(server, load(moe), tmp_path, attempts=3)) as engine:
        server.faults.extend(["garbage"] * 3)
        with pytest.raises(
            RuntimeError, match=r"^sampling failed 3 times with the vLLM server at .* answers no JSON"
        ) as error:
            engine.generate([[1, 2]], 5)
        assert "\n" not in str(error.value)
        server.faults.extend(["hang"] * 9)
        engine.server.http.timeout = 0.2
        with pytest.raises(RuntimeError, match=r"^sampling failed 3 times .* ReadTimeout"):
            engine.generate([[1, 2]], 5)


def test_a_server_that_dies_in_mid_generation_gets_the_newest_weights_and_the_lost_requests(moe, tmp_path):
    model = load(moe)
    with MockVLLM(moe, pace_s=0.02) as server, closing(connect(server, model, tmp_path)) as engine:
        engine.push_weights(moved(model), 3)
        wanted = engine.generate(PROMPTS, 8, sequence_ids=range(5))
        answer = []
        asking = threading.Thread(target=lambda: answer.append(engine.generate(PROMPTS, 8, sequence_ids=range(5))))
        asking.start()
        while not server.running:
            time.sleep(0.002)
        server.kill()
        time.sleep(0.1)
        server.start()  # with the weights of its folder, as "default"
        asking.join(60)
        assert (
            answer == [wanted] and answer[0].version == [3] * 5
        )  # pushed again, sampled again, with the same streams
        assert engine.restarts == 1


def test_a_server_that_dies_before_the_proof_gets_the_weights_again(moe, tmp_path):
    model = load(moe)
    with MockVLLM(moe) as server, closing(connect(server, model, tmp_path)) as engine:
        post, deaths = engine.server.post, []

        def dying(path, **options):
            if "generate" not in path or deaths:
                return post(path, **options)
            deaths.append(path)
            server.kill()
            try:
                return post(path, **options)
            finally:
                server.start()  # with its first weights

        engine.server.post = dying
        engine.push_weights(moved(model), 3)
        assert deaths and engine.retries == 1 and server.labels[-1] == "3"
        assert engine.generate([[1, 2]], 5).version == [3]


@pytest.mark.slow
def test_a_server_whose_engine_died_is_waited_for_and_a_lost_answer_to_that_is_asked_for_again(moe, tmp_path):
    """It answers 500 to requests and 503 to the question for its health until a supervisor starts it again."""
    model = load(moe)
    with MockVLLM(moe) as server, closing(connect(server, model, tmp_path, attempts=3)) as engine:
        engine.push_weights(moved(model), 3)
        handle, label, lost = server.handle, engine.server.label, []
        server.handle = lambda path, query, body: (503 if path == "/health" else 500, b"dead")

        def restart():
            server.handle = handle
            server.kill()
            server.start()

        def losing():
            if not lost:
                lost.append(1)
                raise ServerGone("/weight_info: RemoteProtocolError")
            return label()

        engine.server.label = losing
        timer = threading.Timer(2.0, restart)
        timer.start()
        assert engine.generate([[1, 2]], 5).version == [3]
        timer.join()
        assert lost and engine.retries == 2 and engine.restarts == 1


def test_a_server_that_does_not_come_back_ends_in_one_sentence(moe, tmp_path):
    with MockVLLM(moe) as server, closing(connect(server, load(moe), tmp_path, restart_s=0.3)) as engine:
        server.kill()
        with pytest.raises(RuntimeError, match="is gone and did not come back within 0 s: start it again and resume"):
            engine.generate([[1, 2]], 5)
        server.start()


def test_weights_that_nobody_pushed_are_not_trained_on(moe, tmp_path):
    """The server restarts between two requests, unseen: its label gives it away."""
    model = load(moe)
    with MockVLLM(moe) as server, closing(connect(server, model, tmp_path)) as engine:
        engine.push_weights(moved(model), 3)
        server.kill()
        server.start()
        rollout = engine.generate(PROMPTS, 6)
        assert rollout.version == [3] * 5 and engine.restarts == 1
        assert rollout.rollout_logps[0] == pytest.approx(own_logps(model, rollout, 0), abs=1e-4)


@pytest.mark.parametrize("on_push", ["finish", "continue", "restart"])
def test_a_push_in_mid_generation(moe, tmp_path, on_push):
    model = load(moe)
    with MockVLLM(moe, pace_s=0.02) as server:
        inner = connect(
            server, model, tmp_path, on_push=on_push, attempts=1
        )  # a request that a push ends is no failure
        with closing(AsyncEngine(inner, on_push=on_push)) as engine:
            group = Group({}, [11, 12, 13], [0, 1, 2])
            old = inner.generate([[11, 12, 13]] * 3, 30, sequence_ids=[0, 1, 2])
            engine.ask([group], 30)
            while not server.running:
                time.sleep(0.002)
            engine.push_weights(moved(model), 1)
            engine.buffer.take(1, now=1, max_staleness=1)
            rollout = group.rollout
            versions = [set(row) for row in rollout.token_versions]
            if on_push == "finish":
                assert versions == [{0}] * 3 and rollout.completion_ids == old.completion_ids
            elif on_push == "restart":
                assert versions == [{1}] * 3 and rollout.version == [1] * 3 and inner.retries >= 1
                assert rollout.rollout_logps[0] == pytest.approx(own_logps(model, rollout, 0), abs=1e-4)
            else:
                assert {0, 1} in versions and all(row == sorted(row) for row in rollout.token_versions)
                for i, row in enumerate(rollout.token_versions):
                    assert rollout.completion_ids[i][: row.count(0)] == old.completion_ids[i][: row.count(0)]
                    assert rollout.version[i] == min(row)


def test_a_run_that_ends_in_a_push_leaves_a_server_that_answers(moe, tmp_path):
    model = load(moe)
    with MockVLLM(moe) as server:
        engine, arrived, proceed, ends = connect(server, model, tmp_path), threading.Event(), threading.Event(), []
        send = engine.transfer.send

        def slow(*args):
            arrived.set()
            proceed.wait(20)
            send(*args)

        def push():
            with pytest.raises(RuntimeError) as caught:
                engine.push_weights(moved(model), 1)
            ends.append(caught.value)

        engine.transfer.send = slow
        thread = threading.Thread(target=push)
        thread.start()
        assert arrived.wait(20) and not server.open.is_set()
        engine.close()
        proceed.set()
        thread.join(20)
        assert len(ends) == 1 and server.open.is_set()


def test_a_server_that_a_killed_run_left_paused_is_taken_over(moe, tmp_path):
    model = load(moe)
    with MockVLLM(moe) as server:
        server.open.clear()
        with closing(connect(server, model, tmp_path, timeout_s=5.0)) as engine:
            assert engine.generate(PROMPTS, 4).version == [0] * 5
        server.open.clear()  # one that does not push has no say in it: the first process does
        with pytest.raises(ServerGone, match="ReadTimeout"):
            connect(server, model, tmp_path, timeout_s=0.5, pushes=False)


def test_one_process_pushes_and_the_others_wait_for_the_label(moe, tmp_path):
    model = load(moe)
    with MockVLLM(moe) as server, closing(connect(server, model, tmp_path)) as first:
        with closing(connect(server, model, tmp_path, pushes=False)) as second:
            assert second.fingerprint == first.fingerprint and second.version == 0
            moved(model)
            copied = second.copy_weights(model)
            assert copied.weights is None and isinstance(copied, ScoredWeights)
            waiting = threading.Thread(target=second.push_weights, args=(copied, 1))
            waiting.start()
            waiting.join(0.2)
            assert waiting.is_alive()
            first.push_weights(model, 1)
            waiting.join(20)
            assert not waiting.is_alive() and second.version == 1
            assert second.generate(PROMPTS, 4).version == [1] * 5


def test_the_key_comes_from_the_environment(moe, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with MockVLLM(moe) as server, closing(connect(server, load(moe), tmp_path)) as engine:
        assert engine.server.http.headers["authorization"] == "Bearer secret"


def test_moe_layer_numbers_are_those_of_the_decoder(moe):
    assert moe_layer_numbers(load(moe)) == [0, 1] and moe_layer_numbers(load(MODEL)) == []


# --- recipes on the server --------------------------------------------------------------------------------------------


def test_a_synchronous_recipe_trains_on_a_server(moe, tmp_path):
    changes = {"routing_replay": "r3", "num_minibatches": 2, "max_steps": 4, "engine": "vllm"}
    with MockVLLM(moe, routes=True) as server:
        address = {"vllm_server_base_url": server.url, "vllm_timeout_s": 30.0}
        with closing(make_minirl(tmp_path, moe, **changes, **address)) as trainer:
            start = weights(trainer)
            trainer.train()
        assert not server.errors
    records = logged(trainer)
    assert len(records) == 4 and all(r["mismatch/k3"] < 1e-6 for r in records)  # the same numbers on both sides
    assert [r.get("rollout/weights_changed") for r in records] == [None, None, 1, 1] or records[2][
        "rollout/weights_changed"
    ]
    assert records[0]["routing/rollout_agreement"] == 1 and largest_difference(start, weights(trainer)) > 1e-4


def test_the_alignment_check_compares_what_the_server_tells_and_names_the_rest(moe, tmp_path):
    with MockVLLM(moe) as server:
        changes = {"engine": "vllm", "guard": "warn", "vllm_server_base_url": server.url, "max_steps": 1}
        with closing(make_minirl(tmp_path, moe, **changes)) as trainer:
            stability.train(trainer)
            record, (told,) = json.loads((tmp_path / "alignment.json").read_text()), events(tmp_path, "alignment")
            untold = ["model_type", "embeddings", "pad_token_id"]
            assert record["not_compared"] == untold and told["text"].endswith(f"does not tell: {', '.join(untold)}")
            (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "grad_norm": 1.0}) + "\n")
            assert "not comparable: model_type, embeddings, pad_token_id" in str(checklist(tmp_path))
            server_side = {
                "model": moe,
                "max_model_len": 128,
                "vllm": "0.32.0",
                "rollout_dtype": "float32",
                "version": 0,
            }
            assert server_side.items() <= record["rollout"].items() and record["smoke"]["allowed"] == 1e-3
            trainer.sync_engine()  # after the one step: version 1
            server.settings["dtype"] = "torch.bfloat16"
            assert check_alignment(trainer)["smoke"]["allowed"] == 0.3
            server.labels[-1] = "9"
            with pytest.raises(ValueError, match="version is 1 in training and 9 in the rollout engine"):
                check_alignment(trainer)
            generate = trainer.engine.generate
            trainer.engine.generate = lambda *a, **k: generate(*a, **k | {"temperature": 0.7})
            with pytest.raises(ValueError, match="temperature is 1.0 in training and 0.7"):
                check_alignment(trainer)


@pytest.mark.parametrize(
    "how", [{}, pytest.param({"max_staleness": 2}, marks=pytest.mark.slow)], ids=["synchronous", "ahead"]
)
def test_a_rollback_pushes_the_restored_weights_to_the_server_and_its_masks_are_replayed(moe, tmp_path, how):
    changes = {
        "engine": "vllm", "num_minibatches": 2, "max_steps": 6, "max_completion_length": 8, "top_k": 6, "keep_sampling_mask": True,
        "save_strategy": "steps", "save_steps": 2,
    }  # fmt: skip
    runs = []
    for name, more in (("guarded", {"guard": "rollback", "guard_k": 1}), ("clean", {})):
        with MockVLLM(moe, masks=True) as server:
            make = functools.partial(make_async if how else make_minirl, model=moe, vllm_server_base_url=server.url)
            with closing(faulty(tmp_path / name, "nan", 5, make=make, **changes | more | how)) as trainer:
                engine, pushed = trainer.engine.engine if how else trainer.engine, []
                push = engine.push_weights
                engine.push_weights = lambda model, version, pushed=pushed, push=push: (
                    pushed.append(version), push(model, version)
                )[1]  # fmt: skip
                if not more:
                    trainer.add_callback(DropUpdate(trainer, {5}))
                stability.train(trainer)
                assert (
                    trainer.held_out_accuracy(tiny_rows(2), 1)["problems"] == 2
                )  # with a bounded top_k, which it needs
            assert not server.errors
        runs.append((weights(trainer), pushed, logged(trainer, skip=("async/", "guard/"))))
    assert [run[1] for run in runs] == [[2, 4, 2, 4, 6], [2, 4, 6]]
    assert equal(runs[0][0], runs[1][0]) and [e["to"] for e in events(tmp_path / "guarded", "rollback")] == [2]
    for record in runs[1][2]:
        assert record["support/replayed_frac"] == 1 and record["support/kept_mass"] < 0.99
        assert "support/agreement" not in record and "support/rollout_kept_mass" not in record
    assert runs[1][2][0]["mismatch/mean"] == pytest.approx(1, abs=1e-4)


@pytest.mark.slow
def test_asynchronously_the_server_may_die_and_the_run_goes_on(moe, tmp_path):
    changes = {"max_staleness": 1, "max_steps": 5, "engine": "vllm"}
    runs = []
    for name, fault in (("calm", False), ("drill", True)):
        with MockVLLM(moe) as server:
            address = {"vllm_server_base_url": server.url, "vllm_timeout_s": 30.0, "vllm_restart_s": 30.0}
            with closing(make_async(tmp_path / name, moe, **changes, **address)) as trainer:
                if fault:
                    server.faults.extend(["ok"] * 3 + ["drop", "garbage", "ok", "500", "drop"])
                trainer.train()
            assert trainer.engine.engine.retries == (4 if fault else 0)
        runs.append((weights(trainer), logged(trainer, skip="async/")))
    assert equal(runs[0][0], runs[1][0]) and runs[0][1] == runs[1][1]  # nothing lost, nothing trained twice
    assert [r["async/staleness/max"] for r in logged(trainer)] == [0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"engine": "sglang"}, "--engine sglang is unknown: use transformers or vllm"),
        ({"engine": "vllm", "rollout_dtype": "fp8"}, "--rollout_dtype fp8 is the built-in engine's precision"),
        ({"engine": "vllm", "use_vllm": True}, "--engine vllm and --use_vllm are two ways"),
        ({"vllm_transfer": "tcp"}, "--vllm_transfer tcp is unknown: use disk or nccl"),
        ({"vllm_concurrency": 0}, "--vllm_concurrency 0 must be a whole number from 1 up"),
        ({"engine": "vllm", "top_p": 0.9, "keep_sampling_mask": True}, "--keep_sampling_mask with --engine vllm and --top_k 0"),
    ],
)  # fmt: skip
def test_wrong_flags_are_refused_in_one_sentence(tmp_path, flags, words):
    with pytest.raises(ValueError) as error:
        MiniRLAsyncConfig(**options(tmp_path, use_cpu=True, **flags))
    assert words in str(error.value) and "\n" not in str(error.value)
