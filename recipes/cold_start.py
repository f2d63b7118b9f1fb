"""SFT cold start: the tiny Qwen3 that ships with the project, made from nothing.

A tokenizer is trained on the task's text, a Qwen3 is initialised at random and fine-tuned on worked solutions
(`tiny/tasks.py`): the stage before RL in DeepSeek-R1 (arXiv:2501.12948, section 2.3), at micro scale.

    L = - mean over completion tokens of log pi(token | prompt, tokens before)

Two stages. First a spotless teacher: the model learns the arithmetic. Then, for a few steps, a lazy one: a share `lazy` of
its answers is a boxed guess without work. The result knows how to solve most problems and does so less than half of the time, which
is what RL with verifiable rewards can repair; a spotless teacher alone would leave little to learn, none at all
nothing to reinforce. The noise is ours and deliberate.

Smoke   accelerate launch recipes/cold_start.py --max_steps 20
Full    accelerate launch recipes/cold_start.py                                 (about 7 minutes on 2 CPU cores)
MoE     accelerate launch recipes/cold_start.py --architecture qwen3_moe       (1.07M parameters, 8 experts, 2 a token)
Remake  accelerate launch recipes/cold_start.py --output_dir tiny/qwen3         (overwrites the shipped checkpoint)
Expect  loss 6 -> below 0.1 in the first stage (held-out accuracy 73 %); at the end 37 % at temperature 1, 50 % greedy
Watch   a loss that stalls above 1 has not learned to copy digits: more steps, or a higher learning rate
Knobs   --max_steps, --lazy_steps, --lazy, --learning_rate, --per_device_train_batch_size, --style, --seed
"""

import dataclasses
import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))  # run or copy a recipe without installing anything
from gradloc import GradLoc  # noqa: E402
from rlvr_launch import leave, make_small_parser, one_sentence, refuse_unknown  # noqa: E402
from tiny.tasks import KINDS, LEVELS, STYLES, is_right, make_rows  # noqa: E402

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
MAX_POSITIONS = 4096
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('the tiny chat template knows system, user and assistant, not ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@dataclass
class ColdStartConfig(SFTConfig):
    """SFTConfig plus the teacher, the model and the second stage. A CPU is taken where there is no accelerator."""

    output_dir: str = field(default="runs/cold_start", metadata={"help": "where the checkpoint is written"})
    rows: int = field(default=4800, metadata={"help": "different problems in one round of training data"})
    copies: int = field(
        default=12, metadata={"help": "rounds of the first stage: new problems where a kind has more of them"}
    )
    style: str = field(default="steps", metadata={"help": f"how the teacher solves: {' | '.join(STYLES)}"})
    lazy: float = field(default=0.42, metadata={"help": "second stage: share of answers that are guesses"})
    slip: float = field(default=0.0, metadata={"help": "second stage: share of the other answers with one wrong step"})
    lazy_steps: int = field(default=100, metadata={"help": "optimizer steps of the second stage; 0 = none"})
    lazy_learning_rate: float = field(
        default=3e-4, metadata={"help": "of the second stage; low, because the arithmetic must survive"}
    )
    vocab_size: int = field(default=384, metadata={"help": "tokens at most; fewer where no pair is left to merge"})
    architecture: str = field(default="qwen3", metadata={"help": "qwen3 | qwen3_moe"})
    num_experts: int = field(default=8, metadata={"help": "of qwen3_moe, in each layer; two answer each token"})
    hidden_size: int = field(default=96, metadata={"help": "width of the model"})
    num_layers: int = field(default=4, metadata={"help": "decoder layers"})
    heldout_rows: int = field(
        default=480, metadata={"help": "held-out problems at the end; 480 = 20 of each kind and level"}
    )
    gradloc: str = field(
        default="off",
        metadata={"help": "explain gradient spikes, into output_dir/gradloc: off | directional | search"},
    )

    seed: int = field(default=0, metadata={"help": "of the data, its order and the initial weights"})
    max_steps: int = field(default=2200, metadata={"help": "optimizer steps of the first stage"})
    per_device_train_batch_size: int = field(default=64, metadata={"help": "solutions of one step on one device"})
    learning_rate: float = field(default=4e-3, metadata={"help": "of the first stage"})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "cosine, linear, constant, ..."})
    warmup_steps: float = field(
        default=50, metadata={"help": "steps of linear warm-up; below 1: a share of all steps"}
    )
    weight_decay: float = field(default=0.1, metadata={"help": "of AdamW"})
    adam_beta2: float = field(default=0.999, metadata={"help": "of AdamW"})
    train_sampling_strategy: str = field(
        default="sequential", metadata={"help": "order of the rows, which are shuffled already"}
    )
    max_grad_norm: float = field(default=1.0, metadata={"help": "global gradient clipping; 0 = off"})
    logging_steps: float = field(default=50, metadata={"help": "optimizer steps between two printed losses"})
    save_strategy: str = field(default="no", metadata={"help": "no | steps: checkpoints on the way"})
    report_to: str = field(default="none", metadata={"help": "trackio, wandb, tensorboard, none"})
    activation_checkpointing: bool = field(
        default=False, metadata={"help": "saves memory; TRL turns it on, but here time is what is short"}
    )

    def __post_init__(self):
        if not torch.accelerator.is_available():
            self.use_cpu, self.bf16 = True, False  # TRL's bf16 default ends the run where there is no GPU
        if self.gradloc not in ("off", "directional", "search"):
            raise ValueError(f"--gradloc {self.gradloc} is unknown: use off, directional or search")
        if self.style not in STYLES:
            raise ValueError(f"--style {self.style} is unknown: use one of {', '.join(STYLES)}")
        if self.architecture not in ("qwen3", "qwen3_moe"):
            raise ValueError(f"--architecture {self.architecture} is unknown: use qwen3 or qwen3_moe")
        super().__post_init__()


def make_tokenizer(vocab_size):
    """Byte-level BPE on the task's text, in Qwen3's tokenizer class: its pre-tokenizer keeps every digit apart."""
    text = ["system\nuser\nassistant\n"] * 5000  # the roles become one token each
    for style in STYLES:
        text += [row[key] for row in make_rows("train", 2400, style=style) for key in ("problem", "rationale")]
    qwen3 = Qwen2Tokenizer(vocab={"<|endoftext|>": 0}, merges=[]).backend_tokenizer
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer = qwen3.normalizer, qwen3.pre_tokenizer
    bpe.train_from_iterator(
        text,
        trainers.BpeTrainer(
            vocab_size=vocab_size - len(SPECIALS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    learned = json.loads(bpe.to_str())["model"]
    vocab = learned["vocab"] | {token: len(learned["vocab"]) + i for i, token in enumerate(SPECIALS)}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=[tuple(pair) for pair in learned["merges"]],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=MAX_POSITIONS,
        padding_side="left",
        extra_special_tokens=["<|im_start|>"],
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in SPECIALS[3:]])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(args, tokenizer):
    """A Qwen3ForCausalLM or Qwen3MoeForCausalLM at random: tied embeddings like the small Qwen3s, head_dim 32 so that vLLM serves it."""
    moe = {}
    if args.architecture == "qwen3_moe":
        moe = {
            "num_experts": args.num_experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": args.hidden_size,
            "norm_topk_prob": True,  # as Qwen3-30B-A3B
            "output_router_logits": True,  # in SFT only: the load-balancing loss keeps all experts in use
            "router_aux_loss_coef": 0.01,
        }
    heads = max(4, args.hidden_size // 32)
    config = (Qwen3MoeConfig if moe else Qwen3Config)(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size * 8 // 3,
        num_hidden_layers=args.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.05,
        dtype="float32",
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **moe,
    )
    model = (Qwen3MoeForCausalLM if moe else Qwen3ForCausalLM)(config)
    # top_k 0 and top_p 1: sampling at temperature 1 is the policy itself
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
    )
    return model


def in_batches(rows, size, rng, pool=40):
    """Shuffled rows in which each run of `size` has problems of similar length, so that little is padding.

    The batches are shuffled too. transformers' group_by_length hands them out from long to short, one pool after the
    other: the model then sees one kind of problem for many steps, and after 2,200 steps its loss was 0.43 instead of 0.05.
    """
    rows, ordered = rows.copy(), []
    rng.shuffle(rows)
    for start in range(0, len(rows), size * pool):
        part = sorted(rows[start : start + size * pool], key=lambda row: len(row["problem"]))
        batches = [part[i : i + size] for i in range(0, len(part), size)]
        last = batches.pop() if len(batches[-1]) < size else []  # a short one in between would shift all that follow
        rng.shuffle(batches)
        ordered += [row for batch in batches for row in batch] + last
    return ordered


def make_dataset(args, copies, first_seed=0, lazy=0.0, slip=0.0):
    """Conversational prompt-completion rows, `copies` rounds of args.rows; SFTTrainer masks the prompt out."""
    rows = []
    for i in range(copies):
        seed = args.seed * 1000 + first_seed + i
        rows += make_rows("train", args.rows, seed=seed, style=args.style, lazy=lazy, slip=slip)
    rows = in_batches(rows, args.per_device_train_batch_size, random.Random(f"cold start {args.seed}"))
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": row["problem"]}],
                "completion": [{"role": "assistant", "content": row["rationale"]}],
            }
            for row in rows
        ]
    )


@torch.no_grad()
def solve(model, tokenizer, rows, do_sample, batch_size=240, max_new_tokens=64):
    """One completion for each row, in order: at temperature 1 or greedy. Returns list[bool], right or not."""
    model.eval()
    verdicts = []
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        prompts = tokenizer.apply_chat_template(
            [[{"role": "user", "content": row["problem"]}] for row in part],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        ).to(model.device)
        ids = model.generate(**prompts, do_sample=do_sample, max_new_tokens=max_new_tokens)
        texts = tokenizer.batch_decode(ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        verdicts += [is_right(text, row["answer"]) for text, row in zip(texts, part, strict=True)]
    return verdicts


def accuracy_table(model, tokenizer, rows):
    """Per kind, then per level, then 'all': {name: (accuracy at temperature 1, greedy accuracy)}."""
    sampled, greedy = (solve(model, tokenizer, rows, do_sample) for do_sample in (True, False))
    groups = {kind: [row["kind"] == kind for row in rows] for kind in KINDS}
    groups |= {f"level {level}": [row["level"] == level for row in rows] for level in LEVELS}
    groups["all"] = [True] * len(rows)
    return {
        name: tuple(
            sum(v for v, keep in zip(verdicts, group, strict=True) if keep) / sum(group)
            for verdicts in (sampled, greedy)
        )
        for name, group in groups.items()
    }


def train(model, args, rows, tokenizer):
    """One stage of SFT. Returns its trainer."""
    trainer = SFTTrainer(model, args=args, train_dataset=rows, processing_class=tokenizer)
    if args.gradloc != "off":
        GradLoc(Path(args.output_dir) / "gradloc", method=args.gradloc, tokenizer=tokenizer).attach(trainer)
    trainer.train()
    return trainer


def main():
    parser = make_small_parser(ColdStartConfig, __doc__, show_all="--help_all" in sys.argv)
    with one_sentence():
        args, unknown = parser.parse_args_and_config(return_remaining_strings=True)
        refuse_unknown(unknown, ColdStartConfig)
    set_seed(args.seed)
    tokenizer = make_tokenizer(args.vocab_size)
    model = make_model(args, tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
    trainer = train(model, args, make_dataset(args, args.copies), tokenizer)
    if args.lazy_steps:
        print(
            f"second stage: {args.lazy_steps} steps with a teacher that guesses {args.lazy:.0%} of its answers",
            flush=True,
        )
        lazy_args = dataclasses.replace(args, max_steps=args.lazy_steps, learning_rate=args.lazy_learning_rate)
        rows = make_dataset(args, 2, first_seed=args.copies, lazy=args.lazy, slip=args.slip)
        trainer = train(trainer.model, lazy_args, rows, tokenizer)
    trainer.accelerator.wait_for_everyone()
    if trainer.accelerator.is_main_process:
        save_and_report(trainer, args, tokenizer)
    trainer.accelerator.wait_for_everyone()
    leave()


def save_and_report(trainer, args, tokenizer):
    """Write the checkpoint and print its held-out accuracy."""
    model = trainer.accelerator.unwrap_model(trainer.model).float()
    model.config.use_cache = True  # off in training
    if args.architecture == "qwen3_moe":
        model.config.output_router_logits = False
        model = model.bfloat16()  # three checkpoints ship; half the size, and the accuracy below is of this copy
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    print(f"held-out accuracy, {args.heldout_rows} problems      sampled (T=1)   greedy")
    for name, (sampled, greedy) in accuracy_table(model, tokenizer, make_rows("heldout", args.heldout_rows)).items():
        print(f"  {name:<36}{sampled:>10.1%}{greedy:>13.1%}")
    print(f"checkpoint: {Path(args.output_dir).resolve()}")


if __name__ == "__main__":
    main()
