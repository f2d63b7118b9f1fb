"""Evaluate a model on maths problems: avg@n, pass@k and maj@k with bootstrap intervals over the problems.

    avg@n    mean reward of n samples a problem
    pass@k   1 - C(n - c, k) / C(n, k), c of n samples right: unbiased for the chance that one of k samples is right
             (Chen et al. 2021, arXiv:2107.03374, Eq. 1)
    maj@k    chance that the most frequent answer of k samples is right (self-consistency, Wang et al. 2022,
             arXiv:2203.11171), exact over all choices of k of the n samples

Every sample has its own stream of random numbers, found from (seed, problem, sample): a run that was stopped and
started again, on another number of processes too, writes the same file as one that was not.

Smoke   accelerate launch recipes/evaluate.py                                  tiny/qwen3 on its held-out problems
Own     accelerate launch recipes/evaluate.py --model runs/grpo_tokenclip/final --source my.jsonl --samples 4
Full    accelerate launch recipes/evaluate.py --model Qwen/Qwen3-4B --source math500.jsonl --samples 32 \\
            --temperature 0.6 --top_k 20 --top_p 0.95 --max_new_tokens 16384
Expect  a table, and <output_dir>/problems.jsonl (a line a problem: every sample with its text, answer, reward and
        reason), summary.json, settings.json
Watch   "ended" below 95 %: answers are cut, raise --max_new_tokens. "no answer" high: another --prompt_style
"""

import dataclasses
import hashlib
import json
import math
import os
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import timedelta
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from peft import PeftConfig, PeftModel
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).parents[1]))  # run or copy a recipe without installing anything
from rlvr_data import PROMPT_STYLES, load_math_rows, load_math_rows_report  # noqa: E402
from rlvr_launch import (  # noqa: E402
    check_processes,
    check_ranges,
    find_model,
    make_small_parser,
    one_sentence,
    refuse_unknown,
    say,
)
from rlvr_resume import hold, let_go  # noqa: E402
from rollout import ROLLOUT_DTYPES, TransformersEngine  # noqa: E402
from verifier import MathVerifier, extract_answer  # noqa: E402

RESAMPLES = 10_000
CONFIDENCE = 0.95
MAX_SAMPLES = 1000  # C(1030, 515) no longer fits a float
RANGES = {  # what a number may be: {words: (test, options)}
    "a whole number from 1 up": (
        lambda x: x >= 1 and x == int(x),
        "limit samples max_new_tokens batch_size verifier_workers expect_processes",
    ),
    "a whole number from 0 up": (lambda x: x >= 0 and x == int(x), "top_k seed"),
    "0 or more": (lambda x: x >= 0, "temperature"),
    "above 0": (lambda x: x > 0, "verifier_timeout_s"),
    "above 0 and at most 1": (lambda x: 0 < x <= 1, "top_p"),
    "in [0, 1]": (lambda x: 0 <= x <= 1, "min_p"),
    "in [0, 1)": (lambda x: 0 <= x < 1, "rel_tol"),
}


MOST_TOKENS = 4096  # a sample's default where the model has room for more


def _option(default, text, *aliases):
    """An option; aliases: what the training recipes call the same thing."""
    return field(default=default, metadata={"help": text, "aliases": aliases})


@dataclass
class EvaluateConfig:
    model: str = _option(
        "tiny",
        "tiny, a hub id, or a folder: a model, or a LoRA adapter (merged into its base); or --model_name_or_path",
        "--model_name_or_path",
    )
    source: str = _option(
        "tiny:heldout",
        "problems: tiny, tiny:heldout, a hub id, or a .jsonl/.json/.parquet/.csv file; or --dataset",
        "--dataset",
    )
    output_dir: str | None = _option(None, "unset = runs/evaluate/<model>-<source>, numbered when settings differ")
    limit: int | None = _option(None, "this many problems, drawn with --seed; unset = all")
    prompt_style: str | None = _option(None, f"{' | '.join(PROMPT_STYLES)}; unset = by the source's schema")
    samples: int = _option(8, "samples a problem (n)")
    max_new_tokens: int | None = _option(
        None,
        f"tokens a sample; unset = 64 on tiny, else what the longest prompt leaves of the model's positions, at most {MOST_TOKENS}",
    )
    temperature: float = _option(1.0, "1 = the policy itself, 0 = greedy (then --samples 1)")
    top_k: int = _option(0, "sample from the k likeliest tokens; 0 = all")
    top_p: float = _option(1.0, "sample from the smallest set of tokens with this mass")
    min_p: float = _option(0.0, "drop tokens below this share of the likeliest one's probability")
    rollout_dtype: str | None = _option(None, f"{' | '.join(ROLLOUT_DTYPES)}; unset = bfloat16 on a GPU, else float32")
    batch_size: int = _option(256, "samples generated at once; lower it when memory runs out")
    seed: int = _option(0, "of the samples, of the choice of --limit problems and of the intervals")
    exact_answers: bool | None = _option(None, "only a literal number counts, no expression; unset = on tiny only")
    verifier_workers: int | None = _option(None, "math-verify worker processes; unset = by the number of cores")
    verifier_timeout_s: float = _option(5.0, "wall clock of one verification, seconds")
    rel_tol: float | None = _option(
        None, "relative tolerance for golds that are measurements, like 0.01; unset = none"
    )
    expect_processes: int | None = _option(None, "stop unless the run has this many processes")

    def __post_init__(self):
        tiny = self.source.split(":")[0] == "tiny"
        self.exact_answers = tiny if self.exact_answers is None else self.exact_answers
        if tiny and self.max_new_tokens is None:
            self.max_new_tokens = 64
        if self.rollout_dtype is None:
            self.rollout_dtype = "bfloat16" if torch.accelerator.is_available() else "float32"
        check_ranges(self, RANGES)
        if self.prompt_style not in (None, *PROMPT_STYLES):
            raise ValueError(f"--prompt_style {self.prompt_style} is unknown: use one of {', '.join(PROMPT_STYLES)}")
        if self.rollout_dtype not in ROLLOUT_DTYPES:
            raise ValueError(
                f"--rollout_dtype {self.rollout_dtype} is unknown: use one of {', '.join(ROLLOUT_DTYPES)}"
            )
        if self.samples > MAX_SAMPLES:
            raise ValueError(f"--samples is {self.samples}; give at most {MAX_SAMPLES}")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(f"--temperature 0 makes {self.samples} equal samples; give --samples 1, or a temperature")


# ---- estimators: plain numbers in, plain numbers out ----


def avg_at_k(rewards):
    """Mean of a problem's k rewards. Its expectation does not depend on k, only its noise does."""
    if not rewards:
        raise ValueError("avg_at_k needs at least one reward")
    return sum(rewards) / len(rewards)


def pass_at_k(n, c, k):
    """Probability that k of n samples, c of them right, hold a right one (arXiv:2107.03374, Eq. 1).

    1 - C(n - c, k) / C(n, k), as a product, so that no binomial overflows. Raises ValueError unless 0 <= c <= n and
    1 <= k <= n: with fewer than k samples there is no unbiased estimate.
    """
    _check_draw(n, k)
    if not 0 <= c <= n:
        raise ValueError(f"pass_at_k: {c} right of {n} samples; give a number from 0 to n")
    return 1.0 - math.prod((n - k - i) / (n - i) for i in range(c)) if n - c >= k else 1.0


def maj_at_k(answers, rewards, k):
    """Expected reward of the most frequent answer among k of the n samples, drawn without replacement.

    answers: n hashable normalised answers, None = no answer, which has no vote. rewards: n numbers; an answer is worth
    the mean reward of its samples. Draws without any vote are worth 0. paper: ties not stated; we: answers that share
    the first place share the reward, which is what breaking ties at random gives on average.

    Exact, with no resampling: for each answer a and each number of votes v it weighs the draws where a has v votes, t
    others have v too and the rest fewer. The weights come from a generating function with one factor for each answer,
    in which an answer with s samples gets j votes with weight Binomial(s, k/n)(j); given a total of k draws the
    weights are those of the multivariate hypergeometric law, for any value in place of k/n.
    """
    n = len(answers)
    _check_draw(n, k)
    if len(rewards) != n:
        raise ValueError(f"maj_at_k: {n} answers but {len(rewards)} rewards")
    sizes, worth = Counter(answers), defaultdict(float)
    for answer, reward in zip(answers, rewards, strict=True):
        worth[answer] += reward / sizes[answer]
    silent = sizes.pop(None, 0)
    expected = 0.0
    for votes in range(1, k + 1):
        rivals = {a: s for a, s in sizes.items() if s >= votes}
        # answers that can never have `votes` votes, and samples without an answer, fill up the draw freely
        filler = _binomial(silent + sum(sizes.values()) - sum(rivals.values()), k / n, k)  # (k+1,)
        for winner in (a for a in rivals if worth[a]):
            table = np.zeros((k // votes + 1, k + 1))  # [ties, draws]
            table[0] = filler
            for answer, size in rivals.items():
                table = _with_answer(table, _binomial(size, k / n, k), votes, wins=answer == winner)
            expected += worth[winner] * (table[:, k] / np.arange(1, len(table) + 1)).sum()
    return float(expected / _binomial(n, k / n, k)[k])


def _with_answer(table, weights, votes, wins):
    """Multiply the generating function [ties, draws] by one answer's factor: it wins, or it ties or stays below."""
    new = np.zeros_like(table)
    width = table.shape[1]
    if wins:
        new[:, votes:] = weights[votes] * table[:, : width - votes]
        return new
    for j in range(votes):
        new[:, j:] += weights[j] * table[:, : width - j]
    new[1:, votes:] += weights[votes] * table[:-1, : width - votes]
    return new


def _binomial(size, p, top):
    """Binomial(size, p) probabilities of 0..top, (top+1,)."""
    return np.array([math.comb(size, j) * p**j * (1 - p) ** (size - j) if j <= size else 0.0 for j in range(top + 1)])


def _check_draw(n, k):
    if not 1 <= k <= n <= MAX_SAMPLES:
        raise ValueError(f"k is {k} and n is {n}; k must be from 1 to n, and n at most {MAX_SAMPLES} samples")


def bootstrap_interval(values, confidence=CONFIDENCE, resamples=RESAMPLES, seed=0):
    """Percentile bootstrap interval (low, high) of the mean of `values`, one value a problem, resampling problems.

    It covers the noise of which problems were asked and of which samples were drawn, as both are in the values. Equal
    values (all right, all wrong, one problem) give both ends that value, whatever the truth is. Raises ValueError
    without values or for a confidence outside (0, 1).
    """
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"bootstrap_interval needs a list of at least one value, not shape {values.shape}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; give a number between 0 and 1, like 0.95")
    generator = np.random.default_rng(seed)
    block = max(1, 1_000_000 // len(values))  # bounds the memory
    means = np.concatenate(
        [
            values[generator.integers(len(values), size=(min(block, resamples - start), len(values)))].mean(1)
            for start in range(0, resamples, block)
        ]
    )
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def normalised_answer(text):
    """The form in which answers vote: one for spellings that differ in blanks, $, sizes, zeros or kind of fraction.

    None for no answer. `1,234`, `1234`, `1234.0` and `01234` are one; so are 0.5, 1/2 and \\dfrac{1}{2}. The gold is
    not looked at: votes that only a comparison with it would merge stay apart.
    """
    if text is None:
        return None
    text = re.sub(r"\\(?:left|right|displaystyle|[,;!: ])|[\s$~]|\.$", "", text.strip())
    text = re.sub(r"\\[dt]frac", r"\\frac", text.replace("{,}", ","))
    if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?", text):
        text = text.replace(",", "")
    text = re.sub(r"^([+-]?)\\frac\{(\d+)\}\{(\d+)\}$", r"\1\2/\3", text)
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+|\d+/0*[1-9]\d*)", text):  # no exponents: 1e999999999 would never end
        text = str(Fraction(text))
    return text or None


# ---- the model ----


def load_model(name):
    """(model on the CPU, tokenizer) for a tiny model's name, a folder or a hub id; a local LoRA adapter is merged into its base."""
    place = find_model(name, flag="--model")
    folder = Path(place).expanduser()
    try:
        if (folder / "adapter_config.json").is_file():
            base = find_model(
                PeftConfig.from_pretrained(place).base_model_name_or_path, flag=f"--model {name}, base model"
            )
            model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), place)
            model = model.merge_and_unload()
            tokenizer = AutoTokenizer.from_pretrained(place if (folder / "tokenizer_config.json").is_file() else base)
        else:
            model = AutoModelForCausalLM.from_pretrained(place, dtype="auto")
            tokenizer = AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"--model {name} cannot be loaded: {first}") from error
    return model.eval(), tokenizer


def make_engine(model, tokenizer, config, device):
    """A TransformersEngine whose samples end at any EOS that the model's generation config or the tokenizer names."""
    eos = model.generation_config.eos_token_id
    eos = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    if tokenizer.eos_token_id is not None:
        eos.append(tokenizer.eos_token_id)
    if not eos:
        raise ValueError(
            f"--model {config.model} names no end-of-sequence token, in its tokenizer or generation config"
        )
    pad = eos[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return TransformersEngine(model, eos, pad, rollout_dtype=config.rollout_dtype, seed=config.seed, device=device)


def prompt_ids(rows, tokenizer):
    """Token ids of each row's prompt; without a chat template the messages' plain text (a base model)."""
    if tokenizer.chat_template is None:
        return [tokenizer("\n\n".join(m["content"] for m in row["prompt"]) + "\n").input_ids for row in rows]
    return [tokenizer.apply_chat_template(r["prompt"], add_generation_prompt=True, return_dict=False) for r in rows]


def settle_max_new_tokens(asked, rows, prompts, positions):
    """--max_new_tokens; where it is unset (None), what the longest prompt leaves of the model's positions (None: no limit).

    Raises ValueError naming the problem with the longest prompt, where a number that was asked for does not fit beside
    it, or nothing does.
    """
    longest = max(range(len(rows)), key=lambda i: len(prompts[i]))
    room = MOST_TOKENS if positions is None else positions - len(prompts[longest])
    problem = f"problem {rows[longest]['id']} has {len(prompts[longest])} prompt tokens"
    if room < 1:
        raise ValueError(f"{problem}, which leaves none of the model's {positions} positions for an answer")
    if asked is None:
        return min(room, MOST_TOKENS)
    if positions is not None and asked > room:
        raise ValueError(
            f"{problem}: with --max_new_tokens {asked} it exceeds the model's {positions} positions; "
            f"give --max_new_tokens {room} or less, or leave it out"
        )
    return asked


# ---- the folder: settings, one line a problem, resume ----


def settings_of(config, engine, prompts, golds):
    """What must not change within one folder, as a flat dict that survives JSON."""
    frozen = dataclasses.asdict(config)
    for name in ("output_dir", "batch_size", "verifier_workers", "expect_processes", "limit"):
        del frozen[name]
    content = json.dumps([prompts, golds])
    return frozen | {
        "problems": len(prompts),
        "problems_sha256": hashlib.sha256(content.encode()).hexdigest()[:16],
        "weights": engine.fingerprint[:16],
    }


def changed_setting(folder, settings):
    """None when `folder` can take a run with `settings` (it is new, or holds one with the same), else what differs."""
    try:
        held = json.loads((folder / "settings.json").read_text())
    except FileNotFoundError:
        stray = next(folder.glob("problems*.jsonl"), None)
        return f"{stray.name} but no settings.json" if stray else None
    except json.JSONDecodeError:
        return "a broken settings.json"
    for name in settings | held:
        if held.get(name) != settings.get(name):
            return f"{name} {held.get(name)}, not {settings.get(name)}"
    return None


def settle_folder(config, settings):
    """The folder of this run: the named one must be new or hold the same settings; the default one is numbered."""
    if config.output_dir is not None:
        folder = Path(config.output_dir).expanduser()
        held = changed_setting(folder, settings)
        if held:
            raise ValueError(
                f"--output_dir {folder} holds an evaluation with {held}; name another folder or delete it"
            )
        return folder
    model, source = (re.sub(r"[^\w.]+", "-", Path(part).name or part) for part in (config.model, config.source))
    base = Path("runs") / "evaluate" / f"{model}-{source}"
    number, folder = 1, base
    while changed_setting(folder, settings):
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder


def take_folder(folder, settings):
    """Be the one evaluation that writes into `folder`. Raises ValueError where another one is, or was since it was chosen."""
    folder.mkdir(parents=True, exist_ok=True)
    hold(folder)
    if held := changed_setting(folder, settings):
        raise ValueError(f"{folder} has just been taken by an evaluation with {held}; start this one again")
    write_atomically(folder / "settings.json", json.dumps(settings, indent=2) + "\n")


def write_atomically(path, text):
    """A kill at any moment leaves the old file or the new one."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def read_results(folder):
    """{index: line as dict} of every problems*.jsonl; a last line that a kill cut off is left out."""
    results = {}
    for path in sorted(folder.glob("problems*.jsonl")):
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            try:
                result = json.loads(line)
                results[result["index"]] = result
            except (ValueError, TypeError, KeyError) as error:
                if number == len(lines):  # no newline after it: the kill came while it was written
                    continue
                raise ValueError(f"{path}, line {number}: broken; delete the line and run again") from error
    return results


def collect(folder, groups):
    """Merge the processes' files into problems.jsonl, in order, whole groups only; returns {index: result}.

    A group is what was generated in one batch. Half a group is done again as a whole, so that every sample is computed
    beside the same others as in a run without a stop: sums of floats depend on the padding.
    """
    results = read_results(folder)
    kept = {i: results[i] for group in groups if all(i in results for i in group) for i in group}
    write_atomically(folder / "problems.jsonl", "".join(json.dumps(kept[i], ensure_ascii=False) + "\n" for i in kept))
    for path in folder.glob("problems.rank*.jsonl"):
        path.unlink()
    return kept


# ---- the run ----


@dataclass
class Job:
    """What a run needs; rows, prompts (token ids) and groups (of indices into both) are the same on every process."""

    config: EvaluateConfig
    state: PartialState
    engine: TransformersEngine
    tokenizer: PreTrainedTokenizerBase
    rows: list[dict]
    prompts: list[list[int]]
    groups: list[range]
    folder: Path
    settings: dict


def prepare(config):
    """Load everything, check every input, choose the folder. All processes call it. Writes nothing."""
    # Ranks finish at different times, and the default timeout of a process group is 10 to 30 minutes.
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=7))
    check_processes(config)
    try:
        rows = load_math_rows(config.source, limit=config.limit, seed=config.seed, prompt_style=config.prompt_style)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"--source {config.source}: {error}") from error
    say(f"problems: {load_math_rows_report(rows)}")
    rows = rows.to_list()
    model, tokenizer = load_model(config.model)
    prompts = prompt_ids(rows, tokenizer)
    positions = model.config.get_text_config().max_position_embeddings
    tokens = settle_max_new_tokens(config.max_new_tokens, rows, prompts, positions)
    config = dataclasses.replace(config, max_new_tokens=tokens)
    say(f"tokens a sample: at most {tokens} (--max_new_tokens)")
    engine = make_engine(model, tokenizer, config, state.device)
    settings = settings_of(config, engine, prompts, [row["solution"] for row in rows])
    at_once = max(1, config.batch_size // config.samples)
    groups = [range(i, min(i + at_once, len(rows))) for i in range(0, len(rows), at_once)]
    folder = settle_folder(config, settings)
    if state.is_main_process:
        take_folder(folder, settings)
    return Job(config, state, engine, tokenizer, rows, prompts, groups, folder, settings)


def evaluate(job):
    """Sample, verify, write, summarise. All processes call it; returns the summary on the first, None elsewhere."""
    state, folder = job.state, job.folder
    if state.is_main_process:
        collect(folder, job.groups)
    state.wait_for_everyone()
    done = read_results(folder)
    state.wait_for_everyone()  # nobody writes before everybody has read
    sample(job, done)
    state.wait_for_everyone()
    if not state.is_main_process:
        return None
    summary = summarise(list(collect(folder, job.groups).values()), job.config)
    write_atomically(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    let_go(folder, remove=True)
    say(f"\n{report(summary)}\n\n  written to {folder.resolve()}: summary.json, problems.jsonl, settings.json")
    return summary


def sample(job, done):
    """Generate, verify and append to this process's file, a group at a time, what `done` ({index: result}) lacks."""
    config, state, n = job.config, job.state, job.config.samples
    left = [group for group in job.groups if group[0] not in done]
    mine = left[state.process_index :: state.num_processes]
    if not mine:
        return
    verifier = MathVerifier(
        config.verifier_workers,
        timeout_s=config.verifier_timeout_s,
        exact=config.exact_answers,
        rel_tol=config.rel_tol,
    )
    accuracies = [_accuracy(result) for result in done.values()]
    total = n * (sum(map(len, mine)) + len(done) // state.num_processes)
    name = "problems.jsonl" if state.is_main_process else f"problems.rank{state.process_index}.jsonl"
    with (
        open(job.folder / name, "a", encoding="utf-8") as file,
        tqdm(
            total=total, initial=total - n * sum(map(len, mine)), unit=" samples", disable=not state.is_main_process
        ) as bar,
    ):
        for group in mine:
            for result in sample_group(job, group, verifier, bar):
                file.write(json.dumps(result, ensure_ascii=False) + "\n")
                accuracies.append(_accuracy(result))
            file.flush()
            bar.set_postfix({f"avg@{n}": f"{100 * sum(accuracies) / len(accuracies):.1f}%"}, refresh=False)


def sample_group(job, group, verifier, bar):
    """The results of the problems in `group`, one dict a problem: the lines of problems.jsonl."""
    config, n, start = job.config, job.config.samples, bar.n
    rollout = job.engine.generate(
        [job.prompts[i] for i in group for _ in range(n)],
        config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        batch_size=config.batch_size,
        sequence_ids=[i * n + j for i in group for j in range(n)],
        on_progress=lambda finished, _: bar.update(start + finished - bar.n),
    )
    texts = job.tokenizer.batch_decode(rollout.completion_ids, skip_special_tokens=True)
    verdicts = verifier.verify_batch([job.rows[i]["solution"] for i in group for _ in range(n)], texts)
    samples = [
        {
            "text": text,
            "reward": verdict.reward,
            "reason": verdict.reason,
            "answer": extract_answer(text)[0],
            "tokens": len(ids),
            "finished": finished,
        }
        for text, verdict, ids, finished in zip(texts, verdicts, rollout.completion_ids, rollout.finished, strict=True)
    ]
    return [
        {
            "index": i,
            "id": job.rows[i]["id"],
            "problem": job.rows[i]["prompt"][-1]["content"],
            "gold": job.rows[i]["solution"],
            "samples": samples[place * n : (place + 1) * n],
        }
        for place, i in enumerate(group)
    ]


def _accuracy(result):
    return avg_at_k([sample["reward"] or 0.0 for sample in result["samples"]])


# ---- the summary ----


def summarise(results, config):
    """Every metric with its interval, from the lines of problems.jsonl."""
    n = config.samples
    scored = [r["samples"] for r in results if all(s["reward"] is not None for s in r["samples"])]
    every = [s for r in results for s in r["samples"]]
    if not scored:
        raise ValueError("no problem could be scored: every gold was refused by the verifier")
    ks = [k for k in (2**i for i in range(n.bit_length())) if k < n] + [n]
    values = {f"avg@{n}": [avg_at_k([s["reward"] for s in p]) for p in scored]}
    for k in ks:
        values[f"pass@{k}"] = [pass_at_k(n, sum(s["reward"] == 1.0 for s in p), k) for p in scored]
    for k in ks:
        values[f"maj@{k}"] = [
            maj_at_k([normalised_answer(s["answer"]) for s in p], [s["reward"] for s in p], k) for p in scored
        ]
    metrics = {}
    for name, per_problem in values.items():
        low, high = bootstrap_interval(per_problem, seed=config.seed)
        metrics[name] = {"value": float(np.mean(per_problem)), "low": low, "high": high}
    tokens = [s["tokens"] for s in every]
    return {
        "model": config.model,
        "source": config.source,
        "problems": len(scored),
        "unscored_problems": len(results) - len(scored),
        "samples": n,
        "confidence": CONFIDENCE,
        "metrics": metrics,
        "reasons": {reason: count / len(every) for reason, count in Counter(s["reason"] for s in every).most_common()},
        "ended": sum(s["finished"] for s in every) / len(every),
        "tokens_mean": sum(tokens) / len(tokens),
        "tokens_max": max(tokens),
        "max_new_tokens": config.max_new_tokens,
    }


def report(summary):
    """The summary as a printed table."""
    lines = [
        f"  {summary['model']} on {summary['source']}: {summary['problems']} problems x {summary['samples']} samples"
        + (
            f", {summary['unscored_problems']} problems left out as unscorable" if summary["unscored_problems"] else ""
        ),
        "",
        f"  {'metric':<10}{'value':>8}   {100 * summary['confidence']:g} % interval over problems",
    ]
    for name, m in summary["metrics"].items():
        lines.append(f"  {name:<10}{100 * m['value']:>7.1f}%   {100 * m['low']:.1f} .. {100 * m['high']:.1f}")
    reasons = ", ".join(f"{reason} {100 * share:.1f} %" for reason, share in summary["reasons"].items())
    lines += [
        "",
        f"  verdicts: {reasons}",
        f"  ended: {100 * summary['ended']:.1f} % of samples; tokens: mean {summary['tokens_mean']:.0f}, "
        f"longest {summary['tokens_max']}, at most {summary['max_new_tokens']} allowed",
    ]
    return "\n".join(lines)


def main():
    with one_sentence():
        config, unknown = make_small_parser(EvaluateConfig, __doc__).parse_args_and_config(
            return_remaining_strings=True
        )
        refuse_unknown(unknown, EvaluateConfig)
        job = prepare(config)
    evaluate(job)


if __name__ == "__main__":
    main()
