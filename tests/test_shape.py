"""The recipes have one shape: a reader of one knows where to look in the next."""

import ast
import dataclasses
import re

import pytest

import ares_dapo
import cold_start
import dsv32_stable
import evaluate
import grpo_tokenclip
import minirl_async_r3
import minirl_sync
from async_rollout import AsyncConfig
from rlvr_common import RLVRConfig
from training import REPO

RECIPES = ["grpo_tokenclip", "minirl_sync", "minirl_async_r3", "dsv32_stable", "ares_dapo"]
PARTS = ["Papers:", "Smoke ", "Compare ", "Full ", "Expect ", "Knobs ", "Watch "]


@pytest.fixture(params=RECIPES)
def tree(request):
    return ast.parse((REPO / "recipes" / f"{request.param}.py").read_text())


def test_docstring_says_paper_commands_expectation_knobs_and_what_to_watch_in_that_order(tree):
    doc = ast.get_docstring(tree)
    places = [re.search(rf"^{part}", doc, flags=re.M) for part in PARTS]
    assert all(places), [part for part, place in zip(PARTS, places, strict=True) if not place]
    assert [p.start() for p in places] == sorted(p.start() for p in places)
    assert re.search(r"^    [A-Za-z_]+ += ", doc[: places[0].start()], flags=re.M)  # equations come first


def test_commands_and_reports_of_the_docstring_exist(tree):
    doc = ast.get_docstring(tree)
    for path in re.findall(r"(?:recipes|results)/[\w/.]+\.(?:py|sh|yaml|md)", doc):
        assert (REPO / path).exists(), path


def test_code_comes_as_config_then_trainer_then_main(tree):
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    (config,) = [n for n in names if n.endswith("Config")]
    (trainer,) = [n for n in names if n.endswith("Trainer")]
    assert names.index(config) < names.index(trainer) < names.index("main") == len(names) - 1


def test_the_trainer_shows_its_loss_and_ends_it_as_every_other(tree):
    (trainer,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name.endswith("Trainer")]
    (loss,) = [n for n in trainer.body if isinstance(n, ast.FunctionDef) and n.name == "_compute_loss"]
    text = ast.unparse(loss)
    assert text.index("self.score(") < text.index("self.track_policy(batch)") < text.index("self.flush()")
    last = ast.unparse(loss.body[-1])
    assert last == "return aggregate(loss, mask, args.aggregation, self.normalizer(args.aggregation))"


@pytest.mark.parametrize(
    "module", [ares_dapo, cold_start, dsv32_stable, evaluate, grpo_tokenclip, minirl_async_r3, minirl_sync]
)
def test_every_option_of_a_script_says_what_it_is(module):
    (config,) = [c for name, c in vars(module).items() if name.endswith("Config") and c.__module__ == module.__name__]
    ours = {name for c in (config, AsyncConfig, RLVRConfig) if issubclass(config, c) for name in c.__annotations__}
    silent = [f.name for f in dataclasses.fields(config) if f.name in ours and not f.metadata.get("help")]
    assert ours and not silent


def test_the_cold_start_shows_itself_and_refuses_what_it_does_not_read(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["cold_start.py", "--help"])
    with pytest.raises(SystemExit) as end:
        cold_start.main()
    text = capsys.readouterr().out
    assert end.value.code == 0 and cold_start.__doc__.splitlines()[0] in text
    assert "--lazy_steps" in text and "--adam_beta1" not in text
    monkeypatch.setattr("sys.argv", ["cold_start.py", "--guard", "warn"])
    with pytest.raises(SystemExit, match="--guard warn is no option of this recipe"):
        cold_start.main()


def public_without_docstring(node, place):
    """Names below `node` that a reader may use and that say nothing of themselves."""
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.ClassDef) and not child.name.startswith("_"):
            name = f"{place}.{child.name}"
            if ast.get_docstring(child) is None:
                yield name
            if isinstance(child, ast.ClassDef):
                yield from public_without_docstring(child, name)


@pytest.mark.parametrize("module", sorted(REPO.glob("*.py")), ids=lambda path: path.name)
def test_everything_public_has_a_docstring(module):
    tree = ast.parse(module.read_text())
    assert ast.get_docstring(tree) and not list(public_without_docstring(tree, module.stem))
