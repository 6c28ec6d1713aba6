"""`hybridflow show`: what is drawn, on a terminal and as a page, and what is said where nothing can be."""

import re
from xml.etree import ElementTree

import pytest

from hybridflow.algorithms.catalogue import ADVANTAGES, POLICY_LOSSES, PREFERENCE_LOSSES
from hybridflow.cli.main import main
from hybridflow.graph.geometry import laid_out
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.plan.dataflow import DATAFLOWS
from hybridflow.launch.step_trace import plan_to_show, trace_step

POOLS = ["trainer.devices=3", "placement.pools.train.devices=2", "placement.pools.judge.devices=1"]


@pytest.fixture(autouse=True)
def _width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def page(tmp_path, capsys):
    """A function: arguments -> the parsed page, and its text."""

    def drawn(*arguments: str) -> tuple[ElementTree.Element, str]:
        file = tmp_path / "drawing.svg"
        assert main(["show", *arguments, "--svg", str(file)]) == 0
        text = file.read_text()
        return ElementTree.fromstring(text), text

    return drawn


def words(page: ElementTree.Element) -> str:
    return " ".join("".join(node.itertext()) for node in page.iter("{http://www.w3.org/2000/svg}text"))


def test_without_arguments_ppo_is_drawn(capsys):
    assert main(["show"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("ppo")
    assert re.search(r"5 +5 critic.advantages +takes uid . response_mask rollout_logprobs \(1\)", shown)
    assert "adds  rewards advantages returns" in shown
    assert re.search(r"8 +8 actor.publish_weights +after 7 *\n", shown)
    assert "would run concurrently: 2 3 4; 6 7" in " ".join(shown.split())
    assert "Not used in this configuration: reference" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_calls_that_run_at_once_are_bracketed(capsys):
    assert main(["show", "--dataflow", "grpo", *POOLS, "placement.roles.reward=judge"]) == 0
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if "reward.score" in line or "actor.logprobs" in line]
    assert ["\u252c" in lines[0], "\u2534" in lines[1]] == [True, True]
    assert "train (2 devices)" in shown and "fsdp, data 2" in shown


@pytest.mark.parametrize(("name", "title"), [("gae", "ppo"), ("group_norm", "grpo"), ("geo_mean", "grpo")])
def test_an_algorithm_may_have_another_name(capsys, name, title):
    assert main(["show", "--dataflow", name]) == 0
    by_dataflow = capsys.readouterr().out
    assert by_dataflow.startswith(title)
    assert main(["show", f"algorithm={name}"]) == 0
    assert capsys.readouterr().out == by_dataflow


def test_settings_may_stand_before_and_behind_options(page, capsys):
    page("algorithm=grpo", "--config-name", "ppo", "algorithm.kl.placement=loss")
    assert "reference.logprobs" in capsys.readouterr().out
    assert main(["show", "algorithm=grpo", "--sgv", "drawing.svg"]) == 2
    assert "There is no option --sgv." in capsys.readouterr().err


def test_a_page_is_whole_by_itself(page):
    drawing, text = page("--dataflow", "grpo", *POOLS, "placement.roles.reward=judge")
    said = words(drawing)
    for name in ("rollout.generate", "reward.score", "actor.publish_weights", "pool judge: 1 device", "2: concurrent"):
        assert name in said
    assert "+\u00a0old_logprobs" in said
    assert "prefers-color-scheme: dark" in text
    assert "href" not in text and "url(" not in text


def test_boxes_and_wires_stay_apart():
    composed = compose_run(["algorithm=safe_rlhf", *POOLS, "placement.roles.cost=judge"], config_name="ppo")
    layout = laid_out(trace_step(plan_to_show(composed)))
    for box in layout.boxes:
        assert box.x > 0 and box.x + box.width < layout.width and box.y + box.height < layout.height
        for other in layout.boxes:
            is_beside = box.x + box.width <= other.x or other.x + other.width <= box.x
            is_above = box.y + box.height <= other.y or other.y + other.height <= box.y
            assert other is box or is_beside or is_above
        for wire in layout.wires:
            for (x1, y1), (x2, y2) in zip(wire.points[1:-1], wire.points[2:-1], strict=False):
                is_clear = max(x1, x2) <= box.x or min(x1, x2) >= box.x + box.width
                assert is_clear or max(y1, y2) <= box.y or min(y1, y2) >= box.y + box.height


def test_a_class_without_a_docstring_is_drawn_without_a_description(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "from hybridflow.dataflows.grpo import GRPO\n\n\nclass Bare(GRPO):\n    pass\n\n\n"
        'class Told(Bare):\n    """\n    In a word.\n\n    More.\n    """\n'
    )
    for name, first_line in (("Bare", "mine.py:Bare"), ("Told", "mine.py:Told  In a word.")):
        assert main(["show", "--dataflow", f"{tmp_path}/mine.py:{name}", "algorithm=grpo"]) == 0
        assert capsys.readouterr().out.splitlines()[0].rstrip() == first_line


def test_a_drawing_does_not_need_an_estimator_that_fits_the_dataflow(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "from hybridflow.dataflows.grpo import GRPO\n\n\nclass Hard(GRPO):\n    compares_samples = True\n"
    )
    assert main(["show", "--dataflow", f"{tmp_path}/mine.py:Hard"]) == 0
    assert "actor.advantages" in capsys.readouterr().out


def test_the_table_has_every_choice_with_its_command(capsys):
    assert main(["show", "--algorithms"]) == 0
    shown = capsys.readouterr().out
    for name in (*ADVANTAGES, *POLICY_LOSSES, *PREFERENCE_LOSSES, *DATAFLOWS):
        assert re.search(rf"^{re.escape(name)} ", shown, re.MULTILINE), name
    assert "algorithm=remax   needs greedy pass" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dataflow", "pppo"], "dataflow=pppo is unknown. What to do: Did you mean 'ppo'?"),
        (["algorithm=grpp"], "There is no algorithm=grpp. What to do: Did you mean 'grpo'?"),
        (["trainer.sed=1"], "Did you mean trainer.seed?"),
        (["--dataflow", "nowhere.py:Mine"], "there is no file"),
        (["--svg", "/nowhere/drawing.svg"], "Give a file in an existing directory."),
    ],
)
def test_what_cannot_be_drawn_is_said_with_what_to_do(capsys, arguments, said):
    assert main(["show", *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_run_file_is_drawn_as_its_command_would_run_it(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("command: dpo\n")
    assert main(["show", str(tmp_path / "run.yaml")]) == 0
    assert capsys.readouterr().out.startswith("dpo")
    (tmp_path / "run.yaml").write_text("command: grpo\nalgorithm.kl.placement: loss\n")
    assert main(["show", str(tmp_path / "run.yaml")]) == 0
    drawn = capsys.readouterr().out
    assert drawn.startswith("grpo") and "ref_logprobs" in drawn
    assert main(["show", str(tmp_path / "run.yaml"), "algorithm.kl.placement=none"]) == 0
    assert "ref_logprobs" not in capsys.readouterr().out


AHEAD = [
    *("asynchrony.max_staleness=1", "trainer.devices=2", "placement.pools.train.devices=1"),
    *("placement.pools.generate.devices=1", "placement.roles.rollout=generate"),
]


def test_what_runs_ahead_is_drawn_by_pool(capsys, page):
    assert main(["show", "--dataflow", "grpo", *AHEAD, "placement.roles.reward=generate"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "rollout.generate and reward.score run 1 step ahead of the other calls. pool" in shown
    assert "first, for step i + 1 then, for step i" in shown
    assert "generate 1 rollout.generate 2 reward.score" in shown
    root, _ = page("--dataflow", "grpo", *AHEAD, "placement.roles.reward=generate")
    assert "rollout.generate and reward.score run 1 step ahead" in words(root)


def test_a_pool_that_cannot_learn_while_it_collects_is_named(capsys):
    assert main(["show", "--dataflow", "grpo", *AHEAD]) == 0
    assert "pool train cannot learn while it collects" in " ".join(capsys.readouterr().out.split())
    assert main(["show", "--dataflow", "grpo"]) == 0
    assert "ahead" not in capsys.readouterr().out


PARTIAL = ["asynchrony.partial_rollouts=true", "asynchrony.max_staleness=2", "asynchrony.ahead=2", *AHEAD[1:]]


def test_partial_rollouts_are_drawn_group_by_group(capsys, page):
    assert main(["show", "algorithm=dapo", *PARTIAL]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    said = (
        "rollout.generate runs up to 2 steps ahead, group by group: a step learns from those that finish first, and the"
        " others continue with the new weights, also while it learns. Groups that filter_out returns are replaced."
    )
    assert said in shown and "cannot learn" not in shown
    assert "train 2 reward.score 3 actor.advantages" in shown
    assert "generate 1 rollout.generate 1 rollout.generate 6 rollout.receive_weights" in shown
    root, _ = page("--dataflow", "dapo", *PARTIAL)
    assert said in words(root)


def test_a_rollout_in_the_processes_of_the_actor_does_not_continue_while_a_step_learns(capsys):
    assert main(["show", "algorithm=grpo", *PARTIAL[:3]]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "the others continue with the new weights." in shown and "also while it learns" not in shown
    assert "main 1 rollout.generate 2 reward.score 3 actor.advantages" in shown
