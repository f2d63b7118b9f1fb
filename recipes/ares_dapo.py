r"""DAPO, GRPO, RLOO, REINFORCE++ or GDPO, trained by Ares or by a baseline optimizer.

    G     = U S V'                                            the gradient of one matrix, p_i = s_i^2 / sum_j s_j^2
    r     = EMA of exp(-sum_i p_i log p_i), <= --rank_max     its effective rank, read anew at each step
    theta = theta - lr m / (sqrt(v) + eps)                    AdamW whose moments m, v see U_r S_r V_r' and not G     (ares.py)

    --algorithm dapo          A = (R - mean) / std in the group; min(r A, clip(r, 0.8, 1.28) A), token mean; dynamic sampling
    --algorithm grpo          the same A; clip 0.2 on both sides; mean over sequences of their token mean
    --algorithm rloo          A = R - mean of the other samples; one ratio a sequence, clipped; mean over sequences
    --algorithm reinforce_pp  A = (R - mean) / std over the whole batch; clip 0.2; token mean
    --algorithm gdpo          each reward by itself (R_k - mean) / std in the group, summed, then standardised over the batch; as grpo

    dynamic sampling          a prompt whose samples are all right or all wrong is replaced by a new one, until the batch is full;
                              decided on accuracy, not on the shaped reward, which would let phantom gradients pass
    --overlong_buffer B       reward + max(-1, min(0, (L_max - B - |y|) / B)), L_max = max_completion_length       (DAPO, eq. 13)
    --reward random           control: each reward drawn with the batch's mean accuracy as its probability
    --mode sft                control: -log pi on the right samples of the initial model, same prompts and batch; no RL

Papers: Ares: only an article is public, see ares.py; DAPO arXiv:2503.14476, GRPO arXiv:2402.03300, RLOO arXiv:2402.14740,
REINFORCE++ arXiv:2501.03262, GDPO arXiv:2601.05242, Muon: torch.optim.Muon, GaLore arXiv:2403.03507. No KL anywhere.

Smoke   accelerate launch recipes/ares_dapo.py                         tiny Qwen3, DAPO, Ares, CPU, minutes; writes spectral.png
Compare accelerate launch recipes/ares_dapo.py --optim_method adamw         (or muon, galore, sgd, rmsprop: each wants its own rate)
Ablate  --rank_mode fixed, --rank_ema 0, --no_low_rank, --ares_step literal
Full    accelerate launch --config_file recipes/configs/accelerate/fsdp2.yaml recipes/ares_dapo.py \
            --config recipes/configs/qwen3_4b_ares.yaml
Expect  held-out accuracy rises by 15 points or more; results/ares/report.md
Knobs   --learning_rate, --optim_method, --rank_max, --ares_step, --algorithm, --overlong_buffer, --max_sampling_rounds
Watch   ares/rank/mean at rank_max: the limit decides, raise it. dynamic/unfilled_frac above 0: prompts too easy or too hard.
        spectral/top_share flat while reward rises: no concentration to exploit. The README explains every metric.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoTokenizer
from trl import get_peft_config

sys.path.insert(0, str(Path(__file__).parents[1]))  # run or copy a recipe without installing anything
from optimizers import OPTIMIZERS  # noqa: E402
from rlvr_common import (  # noqa: E402
    RLVRConfig,
    RLVRTrainer,
    TransformersEngine,
    aggregate,
    group_advantages,
    load_rows,
    make_verifier,
    ppo_clip_loss,
    refuse_unused,
    run,
    truncates,
)
from rlvr_launch import REPO, leave, one_sentence, parse_args  # noqa: E402

ALGORITHMS = {  # name -> aggregation
    "dapo": "token_mean",
    "grpo": "seq_mean_token_mean",
    "rloo": "seq_sum",
    "reinforce_pp": "token_mean",  # paper: per-token objective; the order of means is not stated
    "gdpo": "seq_mean_token_mean",
}


@dataclass
class AresDAPOConfig(RLVRConfig):
    output_dir: str = field(default="runs/ares_dapo", metadata={"help": "where the run is written"})
    learning_rate: float = field(default=1e-6, metadata={"help": "paper: not stated; ours: verl's DAPO script"})
    num_generations: int = field(default=16, metadata={"help": "samples a prompt, G. DAPO: 16"})
    algorithm: str = field(default="dapo", metadata={"help": " | ".join(ALGORITHMS)})
    reward: str = field(default="verifiable", metadata={"help": "verifiable | random (control: same mean rate)"})
    mode: str = field(
        default="rl", metadata={"help": "rl | sft (control: likelihood of the initial model's right samples)"}
    )
    epsilon: float = field(default=0.2, metadata={"help": "eps_low of the ratio clip"})
    epsilon_high: float | None = field(
        default=None, metadata={"help": "eps_high; unset = 0.28 for dapo (its clip-higher), else epsilon"}
    )
    aggregation: str = field(
        default="auto", metadata={"help": "auto (by --algorithm) | token_mean | seq_mean_token_mean | seq_sum"}
    )
    overlong_buffer: int = field(
        default=0, metadata={"help": "soft punishment over the last tokens before the limit; 0 = off. DAPO: 4096"}
    )
    dynamic_sampling: bool | None = field(
        default=None, metadata={"help": "replace prompts without signal; unset = with dapo"}
    )
    max_sampling_rounds: int = field(
        default=4, metadata={"help": "samplings a batch at most with dynamic sampling; ours: 4"}
    )
    optim_method: str | None = field(default="ares", metadata={"help": " | ".join(OPTIMIZERS)})

    def __post_init__(self):
        for name, known in (
            ("algorithm", ALGORITHMS),
            ("reward", ("verifiable", "random")),
            ("mode", ("rl", "sft")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"--{name} {getattr(self, name)} is unknown: use one of {', '.join(known)}")
        if self.aggregation == "auto":
            self.aggregation = ALGORITHMS[self.algorithm]
        elif self.algorithm == "rloo":
            raise ValueError(
                f"--aggregation {self.aggregation}: rloo has one ratio a sequence, there are no tokens to average; remove it"
            )
        if self.epsilon_high is None:
            self.epsilon_high = 0.28 if self.algorithm == "dapo" else self.epsilon
        if self.dynamic_sampling is None:
            self.dynamic_sampling = self.algorithm == "dapo" and self.mode == "rl"
        if self.mode == "sft":
            for name in ("dynamic_sampling", "use_vllm"):
                if getattr(self, name):
                    raise ValueError(f"--mode sft samples from the initial weights in process, once: remove --{name}")
            if self.reward == "random" or self.overlong_buffer:
                raise ValueError("--mode sft knows right and wrong only: remove --reward random, --overlong_buffer")
        if self.overlong_buffer and not 0 < self.overlong_buffer < self.max_completion_length:
            raise ValueError(
                f"--overlong_buffer {self.overlong_buffer} must be 0 or less than --max_completion_length {self.max_completion_length}"
            )
        if self.max_sampling_rounds < 1:
            raise ValueError(f"--max_sampling_rounds {self.max_sampling_rounds} must be at least 1")
        super().__post_init__()


# --- advantages and rewards as pure functions -------------------------------------------------------------------------


def leave_one_out(rewards, num_generations):
    """R - mean of the other scored samples of the group. (N,) -> (N,). RLOO, arXiv:2402.14740; NaN as in `group_advantages`."""
    counts = (~rewards.view(-1, num_generations).isnan()).sum(1, keepdim=True).clamp(min=2)
    factor = (counts / (counts - 1)).expand(-1, num_generations).reshape(-1)
    return group_advantages(rewards, num_generations) * factor


def decoupled_advantages(parts, num_generations, weights):
    """Each reward standardised in its group, weighted sum, then standardised over the batch. parts (N, K) -> (N,). GDPO, arXiv:2601.05242.

    A sample that any reward cannot score has advantage 0 and counts in no mean.
    """
    unscored = parts.isnan().any(1)
    parts = parts.masked_fill(unscored.unsqueeze(1), torch.nan)
    total = sum(w * group_advantages(parts[:, k], num_generations, "group") for k, w in enumerate(weights.tolist()))
    return group_advantages(total.masked_fill(unscored, torch.nan), len(total), "group")


def overlong_penalty(lengths, max_length, buffer):
    """0 up to max_length - buffer tokens, then falling linearly to -1 at max_length. (N,) -> (N,). DAPO eq. 13."""
    return ((max_length - buffer - lengths) / buffer).clamp(-1.0, 0.0)


class AccuracyReward:
    """TRL reward function: the verifier's verdict, 1 or 0; or, with `random`, a draw with the batch's mean accuracy as its rate.

    Evaluation passes no `trainer_state` and always gets verdicts. `place()` names the random stream of a batch.
    """

    __name__ = "accuracy"

    def __init__(self, verifier, random=False, seed=0):
        self.verifier, self.random, self.seed = verifier, random, seed
        self.place = lambda: 0

    def __call__(self, completions, solution, accuracy=None, trainer_state=None, **kwargs):
        if accuracy is not None:
            return accuracy  # dynamic sampling has judged these already
        verdicts = self.verifier(completions=completions, solution=solution, **kwargs)
        if not self.random or trainer_state is None:
            return verdicts
        scored = [v for v in verdicts if v is not None]
        rate = sum(scored) / max(len(scored), 1)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.place())
        draws = torch.rand(len(verdicts), generator=generator) < rate
        return [None if v is None else float(d) for v, d in zip(verdicts, draws.tolist(), strict=True)]


class OverlongReward:
    """TRL reward function over `overlong_penalty`. `limit()` is the length in force; the buffer keeps its share of it."""

    __name__ = "overlong"

    def __init__(self, max_length, buffer):
        self.max_length, self.buffer = max_length, buffer
        self.limit = lambda: max_length

    def __call__(self, completion_ids, **kwargs):
        lengths, limit = torch.tensor([float(len(ids)) for ids in completion_ids]), self.limit()
        return overlong_penalty(lengths, limit, self.buffer * limit / self.max_length).tolist()


# --- the trainer ------------------------------------------------------------------------------------------------------


class AresDAPOTrainer(RLVRTrainer):
    def __init__(self, model, args, verifier, train_dataset, **kwargs):
        rewards = [AccuracyReward(verifier, args.reward == "random", args.seed)]
        if args.overlong_buffer:
            rewards.append(OverlongReward(args.max_completion_length, args.overlong_buffer))
        super().__init__(model, args, rewards, train_dataset, **kwargs)
        if args.overlong_buffer:
            rewards[1].limit = self._completion_limit  # shorter while a stage of the guard is narrow
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        rewards[0].place = lambda: self._sequences_sampled * world + rank
        self._prepared = None
        self._refilled = 0  # prompts drawn for refilling, over all processes: the place in their own order of the data
        local = args.per_device_train_batch_size * args.steps_per_generation
        if args.dynamic_sampling and local % args.num_generations:
            raise ValueError(
                f"dynamic sampling replaces whole groups, and {local} samples a process are not a multiple of --num_generations "
                f"{args.num_generations}: change --per_device_train_batch_size, or --dynamic_sampling false"
            )
        self._first = None
        if args.mode == "sft":  # a second engine, which keeps the weights that the run started from
            start = self.accelerator.unwrap_model(self.model)
            self._first = TransformersEngine(
                start, self.eos_token_ids, self._tokenizer.pad_token_id, rollout_dtype=args.rollout_dtype, seed=args.seed,
                device=self.accelerator.device, record_routes=self.routing is not None, record_support=truncates(args),
            )  # fmt: skip
            self._first.push_weights(start, 0)

    # sampling ---------------------------------------------------------------------------------------------------------

    def _rollout(self, prompts, trainer):
        if self._prepared is not None:
            prepared, self._prepared = self._prepared, None
            self._sampled_routes = prepared.pop("routes")
            self._support, self._kept_mass = prepared.pop("support"), prepared.pop("kept_mass")
            return prepared
        if self._first is None or not self.model.training:
            return super()._rollout(prompts, trainer)
        current, self.engine = self.engine, self._first
        self.engine.version = self.state.global_step  # so that nothing is pushed into it
        try:
            return super()._rollout(prompts, trainer)
        finally:
            self.engine, self._unchanged = current, 0  # unchanged weights are the point here, not a fault
            self._metrics["train"].pop("rollout/weights_changed", None)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self._prepared is not None:
            prepared, self._prepared = self._prepared, None
            return prepared["completion_ids"], prepared["logprobs"]
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)

    def _sample(self, prompts):
        """Samples of one round, as `_rollout` returns them, with what is replayed: "routes", "support", "kept_mass"."""
        if self.engine is not None:
            samples = self._rollout(prompts, self)
            return samples | {"routes": self._sampled_routes, "support": self._support, "kept_mass": self._kept_mass}
        prompt_ids = self._tokenize_prompts(prompts)[0]
        ids, logps = self._generate_single_turn(prompt_ids, None, {}, self.num_generations)
        self._sequences_sampled += len(prompts) * self.accelerator.num_processes
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": logps, "routes": None}

    def _new_rows(self, count):
        """`count` training rows of this process in an order of their own: a permutation after another of the data."""
        world, rank, size = self.accelerator.num_processes, self.accelerator.process_index, len(self.train_dataset)
        rows = []
        for i in range(self._refilled + rank * count, self._refilled + (rank + 1) * count):
            order = torch.randperm(
                size, generator=torch.Generator().manual_seed(self.args.seed * 7919 + 1 + i // size)
            )
            rows.append(self.train_dataset[int(order[i % size])])
        self._refilled += world * count
        return rows

    def _fill(self, inputs):
        """Rows and samples of a whole batch whose groups have right and wrong answers. Sets what the sampling to come returns.

        Every process samples as many prompts a round as the neediest one, because rewards and weights travel in collectives. What is
        still without signal after the last round stays in the batch with advantage 0.
        """
        g, kept, leftover = self.num_generations, [], []
        wanted = len(inputs) // g
        rows, sampled, mixed, rounds = inputs[::g], 0, 0, 0
        while rounds < self.args.max_sampling_rounds:
            lacking = torch.tensor([wanted - len(kept)], device=self.accelerator.device)
            missing = self.accelerator.gather(lacking).max().item()
            if missing == 0:
                break
            rows = rows if rounds == 0 else self._new_rows(missing)
            rounds += 1
            samples = self._sample([row["prompt"] for row in rows for _ in range(g)])
            texts = self.processing_class.batch_decode(samples["completion_ids"], skip_special_tokens=True)
            golds = [row["solution"] for row in rows for _ in range(g)]
            accuracy = self.reward_funcs[0](
                completions=texts, solution=golds, trainer_state=self.state, log_metric=self._log_metric
            )
            for k, row in enumerate(rows):
                part = slice(k * g, (k + 1) * g)
                group = {name: values and values[part] for name, values in samples.items()} | {
                    "rows": [row | {"accuracy": value} for value in accuracy[part]]
                }
                signal = len({value for value in accuracy[part] if value is not None}) > 1
                sampled, mixed = sampled + 1, mixed + signal
                (kept if signal and len(kept) < wanted else leftover).append(group)
        unfilled = wanted - len(kept)
        kept += leftover[:unfilled]
        counts = torch.tensor([sampled, mixed, unfilled, wanted], dtype=torch.float, device=self.accelerator.device)
        sampled, mixed, unfilled, wanted = self.accelerator.reduce(counts, "sum").tolist()
        for name, value in (("rounds", rounds), ("mixed_frac", mixed / sampled), ("unfilled_frac", unfilled / wanted)):
            self._metrics["train"][f"dynamic/{name}"].append(value)
        joined = {name: [x for group in kept for x in group[name] or []] for name in kept[0]}
        self._prepared = {name: joined[name] for name in ("prompt_ids", "completion_ids", "logprobs")}
        self._prepared |= {name: joined.get(name) or None for name in ("routes", "support", "kept_mass")}
        return joined["rows"]

    def _generate_and_score_completions(self, inputs):
        if self.args.dynamic_sampling and self.model.training:
            inputs = self._fill(inputs)
        output = super()._generate_and_score_completions(inputs)
        n, rank = len(inputs), self.accelerator.process_index
        output["accuracy"] = self._parts[rank * n : (rank + 1) * n, 0]
        return output

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        # (N, K), of all ranks
        self._parts = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._rewards[self._parts[:, 0].isnan()] = torch.nan  # a length alone is no reward
        return self._parts

    def advantages(self, rewards, num_generations):
        match self.args.algorithm:
            case "dapo" | "grpo":
                return group_advantages(rewards, num_generations, "group")
            case "rloo":
                return leave_one_out(rewards, num_generations)
            case "reinforce_pp":
                return group_advantages(rewards, len(rewards), "group")
            case "gdpo":
                return decoupled_advantages(self._parts, num_generations, self.reward_weights)

    def recipe_state(self):
        return {"refilled": self._refilled}

    def load_recipe_state(self, state):
        self._refilled = state["refilled"]

    # loss -------------------------------------------------------------------------------------------------------------

    def _loss_mask(self, inputs):
        mask = super()._loss_mask(inputs)
        if self.args.mode == "sft":  # right samples alone, in the loss and in its denominator
            mask = mask * (inputs["accuracy"] > 0.5).unsqueeze(1)
        return mask

    def _compute_loss(self, model, inputs):
        # log-probs of the training engine; old_logps equals logps while one sampling feeds one update
        args, batch = self.args, self.score(model, inputs)
        logps, old_logps = batch.logps, batch.old_logps  # (N, T)
        mask, advantages = batch.mask, batch.advantages  # (N, T), (N, 1)
        if args.mode == "sft":
            loss = -logps
        else:
            if args.algorithm == "rloo":  # one log-prob a sequence, (N, 1): they are zero outside the mask
                logps, old_logps, mask = logps.sum(1, True), old_logps.sum(1, True), mask.any(1, keepdim=True)
            loss = ppo_clip_loss(logps, old_logps, advantages, self.epsilon_low, self.epsilon_high)  # (N, T)
            ratio = (logps - old_logps).detach().exp()
            above, below = ratio > 1 + self.epsilon_high, ratio < 1 - self.epsilon_low
            self.track("ppo_clip/frac", ((advantages > 0) & above | (advantages < 0) & below).float(), mask)
        self.track("accuracy", inputs["accuracy"][~inputs["accuracy"].isnan()])
        self.track_policy(batch)  # entropy, mismatch, raw ratio, omega and rho: what every recipe logs
        self.flush()  # reduced once per optimizer step, over micro-batches and processes
        # the denominator counts the whole optimizer step on all processes, before any clip
        return aggregate(loss, mask, args.aggregation, self.normalizer(args.aggregation))


def main():
    args, model_args = parse_args(AresDAPOConfig, __doc__, default=REPO / "recipes" / "configs" / "tiny_ares.yaml")
    with make_verifier(args) as verifier:
        with one_sentence():  # wrong input ends in a sentence; an error in training keeps its traceback
            refuse_unused(args, {"epsilon", "epsilon_high", "num_iterations", "mask_truncated_completions"})
            tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, padding_side="left")
            train, held_out = load_rows(args, tokenizer)
            trainer = AresDAPOTrainer(
                model_args.model_name_or_path,
                args,
                verifier,
                train,
                processing_class=tokenizer,
                peft_config=get_peft_config(model_args),
            )
        run(trainer, held_out)
    leave()


if __name__ == "__main__":
    main()
