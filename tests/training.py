"""Helpers of the trainer tests: small runs of the recipe and of stock TRL on the tiny model, with the same samples."""

import functools
import json
import re
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl import GRPOConfig, GRPOTrainer

from grpo_tokenclip import GRPOTokenClipConfig, GRPOTokenClipTrainer
from minirl_async_r3 import MiniRLAsyncConfig, MiniRLAsyncTrainer
from minirl_sync import MiniRLConfig, MiniRLTrainer
from rlvr_common import load_math_rows
from rollout import TransformersEngine

REPO = Path(__file__).resolve().parents[1]
MODEL = str(REPO / "tiny" / "qwen3")
TIMES = {"train_runtime", "step_time", "train_samples_per_second", "train_steps_per_second", "verifier/seconds"}


def digits_reward(completions, solution, **kwargs):
    """A reward with spread in every group, so that no advantage is zero: share of digits among the characters."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [len(re.findall(r"\d", text)) / (1 + len(text)) for text in texts]


def length_reward(completions, **kwargs):
    """Spread in almost every group of a random model, whose completions rarely hold a digit."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [len(text) % 7 / 7 for text in texts]


@functools.cache
def tiny_rows(limit):
    return load_math_rows("tiny", limit=limit)


def options(folder, **changes):
    base = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "seed": 3,
    }
    return base | changes


def quiet(trainer):
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    return trainer


def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL, padding_side="left")


def make_ours(folder, rows=64, reward=digits_reward, peft_config=None, model=MODEL, **changes):
    ours = {"token_clip": "none"} | changes
    dataset = tiny_rows(rows)
    args = GRPOTokenClipConfig(**options(folder, **ours))
    return quiet(
        GRPOTokenClipTrainer(model, args, reward, dataset, processing_class=tokenizer(), peft_config=peft_config)
    )


def save_moe(folder):
    """A random Qwen3-MoE (2 layers, 8 experts, 2 a token) with the tiny tokenizer. -> its folder, as text."""
    words = tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, tie_word_embeddings=True, max_position_embeddings=256, initializer_range=0.2,
        bos_token_id=None, eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return str(folder)


def make_minirl(folder, model, rows=64, reward=length_reward, peft_config=None, trainer=MiniRLTrainer, **changes):
    dataset = tiny_rows(rows)
    args = MiniRLConfig(**options(folder, **changes))
    return quiet(trainer(model, args, reward, dataset, processing_class=tokenizer(), peft_config=peft_config))


def make_async(folder, model, rows=64, reward=length_reward, trainer=MiniRLAsyncTrainer, **changes):
    """To be closed: the engine runs in a process of its own."""
    dataset = tiny_rows(rows)
    args = MiniRLAsyncConfig(**options(folder, **changes))
    return quiet(trainer(model, args, reward, dataset, processing_class=tokenizer()))


class EngineRollout:
    """TRL's rollout_func over our engine, so that stock TRL trains on the very samples that our trainer draws."""

    def __init__(self):
        self.engine, self.sampled = None, 0

    def __call__(self, prompts, trainer):
        ids, _, _ = trainer._tokenize_prompts(prompts)
        out = self.sample(ids, trainer)
        return {"prompt_ids": ids, "completion_ids": out.completion_ids, "logprobs": out.rollout_logps}

    def sample(self, ids, trainer):
        if self.engine is None:
            model, pad = trainer.accelerator.unwrap_model(trainer.model), trainer._tokenizer.pad_token_id
            self.engine = TransformersEngine(model, trainer.eos_token_ids, pad, seed=trainer.args.seed)
        self.engine.push_weights(trainer.model, trainer.state.global_step)
        streams = range(self.sampled, self.sampled + len(ids))
        self.sampled += len(ids)
        return self.engine.generate(
            ids, trainer.max_completion_length, temperature=trainer.temperature, sequence_ids=streams
        )


def make_stock(folder, rows=64, model=MODEL, reward=digits_reward, **changes):
    args = GRPOConfig(**options(folder, use_cpu=True, bf16=False, **changes))
    dataset = tiny_rows(rows)
    return quiet(GRPOTrainer(model, reward, args, dataset, processing_class=tokenizer(), rollout_func=EngineRollout()))


def history(trainer, *names):
    return [[record[name] for name in names] for record in trainer.state.log_history if "loss" in record]


def weights(trainer):
    return {k: v.detach().clone() for k, v in trainer.accelerator.unwrap_model(trainer.model).state_dict().items()}


def largest_difference(a, b):
    assert a.keys() == b.keys() and a
    return max((a[k].float() - b[k].float()).abs().max().item() for k in a)


def numbers(path):
    """metrics.jsonl without wall-clock fields: step -> {metric: value}."""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return {line["step"]: {k: v for k, v in line.items() if k not in TIMES} for line in lines}


def equal(a, b):
    """Bitwise equality of nested state (dicts, lists, tensors, numbers)."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b
