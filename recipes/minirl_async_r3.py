r"""MiniRL, asynchronous: rollouts made ahead of time, staleness bounded and corrected, routing replay R3 on a MoE.

    J = E_{y ~ mu} [ sum_t M_t sg[ min(omega_t, cap) ] A log pi_theta(y_t) ]                                     (eq. 7)

    omega = pi_theta / mu        mu sampled with weights up to --max_staleness updates old: omega corrects mismatch and staleness
    r     = pi_theta / pi_old    decides the clip M_t, as in minirl_sync.py
    A     = R - mean(R) over the G samples of a prompt

    --max_staleness S            updates between the weights that sampled and those that train, at most; 0 = minirl_sync.py, bit for bit
    --clip_against proximal      pi_old = the weights when the samples are taken (recomputed, under R3): the clip bounds an update
    --clip_against behaviour     pi_old = mu: the clip bounds what staleness and mismatch together may move
    --on_push finish|continue|restart    a generation under way when new weights come; versions are kept by token
    --take as_finished           groups are used as they finish; those beyond the bound are dropped or recycled (--stale_groups)
    --routing_replay r3          pi_old and pi_theta use the experts that the engine used, of whatever version
    --keep_sampling_mask         and the tokens that its top-p, top-k, min-p left over
    --guard rollback             an alarm also takes back what was sampled ahead since the last good checkpoint

Papers: MiniRL arXiv:2512.01374 (eq. 7, section 3), R3 arXiv:2510.11370; the clip against recomputed weights: decoupled PPO,
arXiv:2110.00641. paper: only synchronous runs; ours: the same loss, whose weight already has mu of the sampling weights below.
On GRPOTrainer and not on TRL's AsyncGRPOTrainer: that one needs FlashAttention's kernels, has one ratio for everything and no
importance correction, and no routes.

Smoke   accelerate launch recipes/minirl_async_r3.py                   tiny Qwen3-MoE, one sampling ahead, CPU, about 2 minutes
Compare accelerate launch recipes/minirl_async_r3.py --max_staleness 0        (or 4, 16; --clip_against behaviour)
vLLM    recipes/serve_vllm.sh MODEL; accelerate launch recipes/minirl_async_r3.py --engine vllm --model_name_or_path MODEL
Full    accelerate launch --config_file recipes/configs/accelerate/fsdp2.yaml recipes/minirl_async_r3.py \
            --config recipes/configs/qwen3_30b_a3b_minirl_n4_r3.yaml --max_staleness 4
Expect  held-out accuracy rises by 15 points or more, timeline.png shows generation beside training; results/async/report.md
Knobs   --max_staleness, --clip_against, --routing_replay, --engine, --learning_rate, --is_cap
Watch   async/waiting_share above 0.1: the trainer waits, the last line of the run says what to change. omega/p99 growing with
        staleness: lower --max_staleness. mismatch/k3 rising with entropy falling: collapse. The README explains every metric.
"""

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoTokenizer
from trl import get_peft_config

sys.path.insert(0, str(Path(__file__).parents[1]))  # run or copy a recipe without installing anything
from async_rollout import AsyncConfig, AsyncTrainer  # noqa: E402
from rlvr_common import (  # noqa: E402
    aggregate,
    load_rows,
    make_verifier,
    minirl_loss,
    refuse_unused,
    run,
)
from rlvr_launch import REPO, leave, one_sentence, parse_args  # noqa: E402


@dataclass
class MiniRLAsyncConfig(AsyncConfig):
    output_dir: str = field(default="runs/minirl_async_r3", metadata={"help": "where the run is written"})
    learning_rate: float = field(default=1e-6, metadata={"help": "paper: not stated; ours: 1e-6, usual for this size"})
    num_generations: int = field(default=16, metadata={"help": "samples a prompt, G. MiniRL: 16"})
    num_minibatches: int | None = field(
        default=1, metadata={"help": "updates of equal size a sampling, N; staleness counts updates"}
    )
    epsilon: float = field(default=0.2, metadata={"help": "eps_low of the decoupled clip. MiniRL: 0.2"})
    epsilon_high: float | None = field(default=0.27, metadata={"help": "eps_high. MiniRL: 0.27"})
    scale_rewards: str = field(
        default="none", metadata={"help": "divide advantages by a deviation: none | group | batch"}
    )
    is_cap: float = field(default=5.0, metadata={"help": "truncation of omega from above. MiniRL: 5"})
    clip_against: str = field(
        default="proximal",
        metadata={"help": "what the clip's ratio is relative to: proximal (recomputed) | behaviour (mu)"},
    )
    no_is: bool = field(default=False, metadata={"help": "ablation: weight r instead of omega"})
    no_clip: bool = field(default=False, metadata={"help": "ablation: M = 1 everywhere"})
    length_norm: bool = field(default=False, metadata={"help": "ablation: mean over a sequence's tokens, not the sum"})
    # sum over tokens, over the number of responses. paper: the constant is not stated; ours: it only scales the learning rate
    aggregation: str = field(default="seq_sum", metadata={"help": "set by --length_norm"})

    def __post_init__(self):
        if self.length_norm:
            if self.aggregation == "token_mean":
                raise ValueError("--length_norm is --aggregation seq_mean_token_mean: remove --aggregation token_mean")
            self.aggregation = "seq_mean_token_mean"
        for name, default in (("epsilon", 0.2), ("epsilon_high", 0.27)):
            if self.no_clip and getattr(self, name) != default:
                raise ValueError(f"--no_clip reads no bounds: remove --{name} {getattr(self, name)}")
        if self.clip_against not in ("proximal", "behaviour"):
            raise ValueError(f"--clip_against {self.clip_against} is unknown: use proximal or behaviour")
        if self.no_is and self.max_staleness:
            raise ValueError(
                f"--no_is with --max_staleness {self.max_staleness}: without omega nothing corrects the staleness; use --max_staleness 0"
            )
        if not self.is_cap > 0:
            raise ValueError(f"--is_cap {self.is_cap} must be above 0")
        super().__post_init__()


class MiniRLAsyncTrainer(AsyncTrainer):
    def _compute_loss(self, model, inputs):
        # log-probs under the routing that --routing_replay asks for; old_logps equals logps while N = 1
        args, batch = self.args, self.score(model, inputs)
        logps, old_logps, rollout_logps = batch.logps, batch.old_logps, batch.rollout_logps  # (N, T)
        mask, advantages = batch.mask, batch.advantages  # (N, T), (N, 1)

        eps_low, eps_high = (math.inf, math.inf) if args.no_clip else (self.epsilon_low, self.epsilon_high)
        behaviour = old_logps if args.no_is else rollout_logps  # (N, T): what the weight's denominator is
        # (N, T): what the clip's denominator is
        anchor = rollout_logps if args.clip_against == "behaviour" else old_logps
        loss = minirl_loss(logps, anchor, behaviour, advantages, eps_low, eps_high, args.is_cap)  # (N, T)

        ratio = (logps - anchor).detach().exp()
        masked = ((advantages > 0) & (ratio > 1 + eps_high)) | ((advantages < 0) & (ratio < 1 - eps_low))
        self.track("minirl/masked_frac", masked.float(), mask)
        self.track("minirl/truncated_frac", ((logps - behaviour).detach().exp() > args.is_cap).float(), mask)
        self.track_policy(batch)  # entropy, mismatch, raw ratio, omega and rho: what every recipe logs
        self.flush()  # reduced once per optimizer step, over micro-batches and processes
        # the denominator counts the whole optimizer step on all processes, before any mask
        return aggregate(loss, mask, args.aggregation, self.normalizer(args.aggregation))


def main():
    args, model_args = parse_args(
        MiniRLAsyncConfig, __doc__, default=REPO / "recipes" / "configs" / "tiny_minirl_async.yaml"
    )
    with make_verifier(args) as verifier:
        with one_sentence():  # wrong input ends in a sentence; an error in training keeps its traceback
            refuse_unused(
                args, {"scale_rewards", "mask_truncated_completions", "num_iterations", "epsilon", "epsilon_high"}
            )
            tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, padding_side="left")
            train, held_out = load_rows(args, tokenizer)
            trainer = MiniRLAsyncTrainer(
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
