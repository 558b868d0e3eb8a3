"""The page of `corral explore`: one closed file, whose numbers and regions are those of the package, in a real browser."""

import base64
import hashlib
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from report.conftest import CONTRAST
from torch import Tensor

import corral
from corral.lab.cli import main
from corral.lab.report.explore import explore_page
from tolerance import assert_close

RULES = [("tv", "binary"), ("tv", "full"), ("kl", "binary"), ("kl", "full")]
CASES = 300


def test_the_page_is_one_file_that_asks_for_nothing() -> None:
    page = explore_page()
    assert len(page.encode()) < 60_000
    assert set(re.findall(r"https?://[^\"' ]*", page)) == {"http://www.w3.org/2000/svg"}, "a name, which nothing fetches"
    assert set(re.findall(r"(?:src|href)=\"([^\"]*)\"", page)) == {"data:,"}
    assert set(re.findall(r"url\([^)]*\)", page)) == {"url(#hatch)"}
    assert not re.search(r"@import|fetch\(|XMLHttpRequest|WebSocket|innerHTML|\beval\(| style=| on\w+=\"", page)


def test_the_policy_lets_in_this_style_and_this_script_alone() -> None:
    page = explore_page()
    found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert found is not None
    policy = dict(one.strip().split(" ", 1) for one in found[1].split(";"))
    assert policy["default-src"] == "'none'"
    for tag in ("style", "script"):
        inside = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert len(inside) == 1
        digest = base64.b64encode(hashlib.sha256(inside[0].encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"


def test_the_command_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["explore"]) == 0
    assert "explore.html: open it in a browser" in capsys.readouterr().out
    assert main(["explore", "--out", "mine.html"]) == 0
    assert (tmp_path / "explore.html").read_text() == (tmp_path / "mine.html").read_text() == explore_page()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["explore.html", "mine.html"], "nothing is left beside it"


@pytest.mark.parametrize(
    ("argv", "status", "sentence"),
    [
        (["--out", "nowhere/page.html"], 1, "there is no folder nowhere to write page.html into"),
        (["--out", "."], 1, "is a folder, and the page is a file"),
        (["--colour", "red"], 2, "explore has no '--colour'"),
    ],
)
def test_the_command_refuses_with_a_sentence(
    argv: list[str],
    status: int,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["explore", *argv]) == status
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ── in the browser ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def open_page(open_file: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Opens the page in a window."""
    path = tmp_path / "explore.html"
    path.write_text(explore_page(), encoding="utf-8")
    return lambda width=1280, height=900, **how: open_file(path, viewport={"width": width, "height": height}, **how)


@pytest.fixture
def page(open_page: Callable[..., Any]) -> Any:
    return open_page()


def policies(count: int = CASES) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Old and new policies from flat to peaked [N 3], sampled tokens and advantages of ±1 [N]."""
    peak = torch.tensor([0.3, 1.0, 5.0], dtype=torch.float64)[torch.arange(count) % 3, None]
    old, new = ((torch.randn(count, 3, dtype=torch.float64) / peak * 2).softmax(-1).clamp(min=1e-4) for _ in range(2))
    near = torch.arange(count) % 2 == 0  # half of them have moved but a little
    new = torch.where(near[:, None], (old.log() + 0.3 * torch.randn(count, 3, dtype=torch.float64)).exp(), new)
    old, new = old / old.sum(-1, keepdim=True), new / new.sum(-1, keepdim=True)
    return old, new, torch.randint(3, (count,)), torch.randint(2, (count,)).double() * 2 - 1


def in_page(page: Any, expression: str, old: Tensor, new: Tensor, token: Tensor, advantage: Tensor) -> list[Any]:
    """A JavaScript expression of `old`, `next`, `a` and `advantage`, for every case."""
    cases = list(zip(old.tolist(), new.tolist(), token.tolist(), advantage.tolist(), strict=True))
    return page.evaluate(f"(cases) => cases.map(([old, next, a, advantage]) => ({expression}))", cases)


def numbers(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gradient(name: str, old: Tensor, new: Tensor, token: Tensor, advantage: Tensor, **config: Any) -> Tensor:
    """−∂L/∂logits of an objective of the package, one token per sequence."""
    logits = new.log().requires_grad_()
    support_old = corral.top_k_support(old.log()[:, None], token[:, None], k=3)
    support_new = corral.gather_support(logits.log_softmax(-1)[:, None], support_old.ids)
    mask = torch.ones_like(token, dtype=torch.bool)[:, None]
    batch = corral.TokenBatch(
        support_new.logp[..., 0], support_old.logp[..., 0], advantage[:, None], mask, support_new, support_old
    )
    corral.make_objective(name, **config)(batch).loss.sum().backward()
    assert logits.grad is not None
    return -logits.grad


@pytest.mark.browser
def test_divergences_are_those_of_the_package(page: Any) -> None:
    cases = policies()
    old, new, token, _ = cases
    p, q = old.log(), new.log()
    this = token[:, None]
    p_a, q_a = p.gather(-1, this)[:, 0], q.gather(-1, this)[:, 0]
    assert_close(numbers(in_page(page, "categoricalKl(next, old)", *cases)), corral.categorical_kl(q, p))
    assert_close(numbers(in_page(page, "categoricalTv(old, next)", *cases)), corral.categorical_tv(p, q))
    assert_close(numbers(in_page(page, "binaryKl(old[a], next[a])", *cases)), corral.binary_kl(p_a, q_a))
    assert_close(numbers(in_page(page, "binaryTv(old[a], next[a])", *cases)), corral.binary_tv(p_a, q_a))
    assert_close(numbers(in_page(page, "ratio(next, old, a)", *cases)), (q_a - p_a).exp())


@pytest.mark.browser
@pytest.mark.parametrize("bound", [0.005, 0.05, 0.4])
def test_the_projection_is_that_of_the_package(page: Any, bound: float) -> None:
    cases = policies()
    ours = corral.project_categorical_kl(cases[1].log(), cases[0].log(), bound, strict=True)
    assert 20 < int(ours.active.sum()) < CASES - 20, "both kinds must be there"
    theirs = in_page(page, f"projectCategoricalKl(next, old, {bound})", *cases)
    column = {key: [one[key] for one in theirs] for key in theirs[0]}
    assert column["active"] == ours.active.tolist()
    loose = {"rtol": 1e-9, "atol": 1e-10}  # two solvers, each to its own rounding
    assert_close(numbers(column["policy"]), ours.logp.exp(), **loose)
    assert_close(numbers(column["dual"]), ours.dual, **loose)
    assert_close(numbers(column["before"]), ours.kl_before, **loose)
    assert_close(numbers(column["after"]), ours.kl_after, **loose)


def retract_logits(old: Tensor, new: Tensor, bound: float, tokens: int) -> tuple[float, Tensor]:
    """`corral.retract` of logits, one row of which has moved: the share kept, and where that row is then."""
    start = old.expand(tokens, -1)
    logits = torch.nn.Embedding.from_pretrained(start.clone(), freeze=False)
    before = corral.snapshot(logits)
    with torch.no_grad():
        logits.weight[0] = new
    done = corral.retract(
        logits, before, lambda: corral.categorical_kl(logits.weight.detach().log_softmax(-1), start), bound=bound
    )
    return done.share, logits.weight[0].detach().softmax(-1)


@pytest.mark.browser
def test_the_network_held_is_where_retract_puts_it(page: Any) -> None:
    """Logits as weights, one token in two moved: the mean KL of both meets the bound, and `retract` ends just short of it."""
    old, new, *_ = cases = policies(30)
    bound, tokens = 0.05, 2
    theirs = in_page(page, f"retractLogits(next, old, {bound}, {tokens})", *cases)
    kept = [one for one in theirs if one["active"]]
    assert 5 < len(kept) < 28, "both kinds must be there"
    assert_close(
        numbers([one["after"] for one in kept]) / tokens, torch.full((len(kept),), bound, dtype=torch.float64), rtol=1e-9
    )
    for p, q, found in zip(old.log(), new.log(), theirs, strict=True):
        share, policy = retract_logits(p, q, bound, tokens)
        assert found["active"] is (share < 1)
        assert 0.8 * found["t"] <= share <= found["t"]
        path = page.evaluate("([next, old, t]) => geometricMixture(next, old, t)", [q.exp().tolist(), p.exp().tolist(), share])
        assert_close(policy, numbers(path))
    ring = page.locator(".triangle .held")
    page.check("input[name=tokens][value='5']")
    assert ring.is_hidden(), "0.173 is below 5 · 0.05: the step is kept whole"
    page.check("input[name=tokens][value='2']")
    where = page.evaluate("toPoint(retractLogits(state.next, state.old, 0.05, 2).policy).join()")
    assert ring.get_attribute("transform").startswith(f"translate({where})")
    assert "0.100, 76 %" in page.locator("#troll-panel .numbers").inner_text()


@pytest.mark.browser
@pytest.mark.parametrize("support", ["old", "union"])
def test_a_support_sees_what_the_package_does(page: Any, support: str) -> None:
    old, new = (torch.randn(100, 6, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    first = old.argmax(-1)
    ids = corral.top_k_support(old, first, k=2).ids
    if support == "union":
        ids = corral.top_k_support(new, first, k=2, ids=ids).ids
    p, q = (corral.gather_support(logp, ids).with_rest() for logp in (old, new))
    expression = (
        f"""((ids) => categoricalKl(onSupport(next, ids), onSupport(old, ids)))(supportIds(next, old, 2, "{support}"))"""
    )
    found = numbers(in_page(page, expression, old.exp(), new.exp(), first, first))
    assert_close(found, corral.categorical_kl(q, p))
    assert (found < corral.categorical_kl(new, old)).all(), "a lower bound"


@pytest.mark.browser
def test_the_union_sees_a_move_in_the_tail_and_the_old_support_does_not(page: Any) -> None:
    # 0.15 from one of two tokens of 0.2 to the other: 0.35 log(0.35/0.2) + 0.05 log(0.05/0.2) = 0.19587 − 0.06931 = 0.127.
    panel = page.locator("#support-panel")

    def read() -> list[str]:
        return [panel.locator(".verdict").text_content(), *panel.locator("dd").all_text_contents()]

    assert read() == ["Outside, and not seen", "0.000", "0.127", "0.050"]
    page.check("input[name=support][value=union]")
    assert read() == ["Outside: seen", "0.127", "0.127", "0.050"]
    page.locator("#tail").fill("0.04")  # 0.24 is below the 0.25 of "no": no union yet
    assert read() == ["Inside", "0.000", "0.008", "0.050"]
    page.locator("#bound").fill("0.005")
    assert read() == ["Outside, and not seen", "0.000", "0.008", "0.005"]


@pytest.mark.browser
@pytest.mark.parametrize("clip", [0.1, 0.5])
def test_clip_acts_where_ppo_clip_does(page: Any, clip: float) -> None:
    cases = policies()
    expected = gradient("ppo_clip", *cases, clip_low=clip, clip_high=clip)
    push = f"clipped(ratio(next, old, a), advantage, {clip}) ? [0, 0, 0] : policyGradient(next, old, a, advantage)"
    assert 20 < int((expected == 0).all(-1).sum()) < CASES - 20
    assert_close(numbers(in_page(page, push, *cases)), expected)


@pytest.mark.browser
@pytest.mark.parametrize(("divergence", "estimator"), RULES)
def test_mask_acts_where_dppo_does(page: Any, divergence: str, estimator: str) -> None:
    cases = policies()
    bound = 0.15 if divergence == "tv" else 0.05
    expected = gradient("dppo", *cases, divergence=divergence, estimator=estimator, bound=bound)
    distance = f"divergence(next, old, a, {{divergence: '{divergence}', estimator: '{estimator}'}})"
    acted = f"masked({distance}, ratio(next, old, a), advantage, {bound})"
    assert 20 < int((expected == 0).all(-1).sum()) < CASES - 20
    assert_close(numbers(in_page(page, f"{acted} ? [0, 0, 0] : policyGradient(next, old, a, advantage)", *cases)), expected)


@pytest.mark.browser
@pytest.mark.parametrize("bound", [0.01, 0.2])
def test_the_arrow_of_troll_is_its_gradient(page: Any, bound: float) -> None:
    cases = policies()
    found = numbers(in_page(page, f"trollGradient(next, old, a, advantage, {bound})", *cases))
    assert_close(found, gradient("troll", *cases, bound=bound), rtol=1e-8, atol=1e-9)


@pytest.mark.browser
def test_a_small_step_moves_the_policy_along_the_arrow(page: Any) -> None:
    cases = policies(60)
    move = numbers(in_page(page, "moveOf(next, policyGradient(next, old, a, advantage))", *cases))
    push = numbers(in_page(page, "policyGradient(next, old, a, advantage)", *cases))
    step = 1e-6 / push.abs().amax(-1, keepdim=True)
    forward, back = (cases[1].log() + step * push).softmax(-1), (cases[1].log() - step * push).softmax(-1)
    assert_close((forward - back) / (2 * step), move, rtol=1e-5, atol=1e-7)


def within(page: Any, method: str, layer: str, policies: Tensor) -> Tensor:
    """Which policies lie in a region as it is drawn; asks the drawing itself."""
    script = """([method, layer, policies]) => {
        const path = document.querySelector(`svg[data-method=${method}] .${layer}`);
        return policies.map((policy) => path.isPointInFill(new DOMPoint(...toPoint(policy))));
    }"""
    return torch.tensor(page.evaluate(script, [method, layer, policies.tolist()]))


@pytest.mark.browser
@pytest.mark.parametrize(("divergence", "estimator"), RULES)
@pytest.mark.parametrize("advantage", [1, -1])
@pytest.mark.parametrize("old", [[0.5, 0.3, 0.2], [0.02, 0.9, 0.08], [0.001, 0.599, 0.4]])
def test_what_is_tinted_and_hatched_is_what_the_rules_say(
    page: Any, old: list[float], advantage: int, divergence: str, estimator: str
) -> None:
    p, token = torch.tensor(old, dtype=torch.float64), 1
    q = (torch.randn(400, 3, dtype=torch.float64) + p.log() * (torch.arange(400) % 2)[:, None]).softmax(-1)
    delta = 0.2 if divergence == "tv" else 0.05
    page.evaluate(
        "([old, advantage, rule]) => change({old, next: [0.3, 0.3, 0.4], token: 1, advantage, rule})",
        [old, advantage, {"divergence": divergence, "estimator": estimator}],
    )
    log_p, log_q, rho = p.log().expand_as(q), q.log(), q[:, token] / p[token]
    if estimator == "full":
        moved = (corral.categorical_tv if divergence == "tv" else corral.categorical_kl)(log_p, log_q)
    else:
        moved = (corral.binary_tv if divergence == "tv" else corral.binary_kl)(log_p[:, token], log_q[:, token])
    kl = corral.categorical_kl(log_q, log_p)
    outward = (rho - 1) * advantage > 0
    for method, distance, bound in (("clip", (rho - 1).abs(), 0.2), ("dppo", moved, delta), ("troll", kl, 0.05)):
        clear = ((distance - bound).abs() > 0.02 * bound) & ((rho - 1).abs() > 0.01)  # a drawing ends at a pixel
        assert int(clear.sum()) > 300
        assert torch.equal(within(page, method, "region", q)[clear], (distance <= bound)[clear])
        if method != "troll":
            assert torch.equal(within(page, method, "blocked", q)[clear], (outward & (distance > bound))[clear])
            clear = (kl - 0.05).abs() > 0.001
            assert torch.equal(within(page, method, "ball", q)[clear], (kl <= 0.05)[clear])


def verdicts(page: Any) -> list[str]:
    return page.locator(".panels .verdict").all_text_contents()


@pytest.mark.browser
def test_presets_show_what_they_say(page: Any) -> None:
    passes, back, projected = "Inside: passes", "Outside, on the way back: passes", "Outside: projected"
    expected = {
        "A clear move": ["Clipped: no gradient", "Masked: no gradient", projected],
        "A rare token rises": ["Clipped: no gradient", passes, "Inside: unchanged"],
        "A likely token falls": [passes, "Masked: no gradient", projected],
        "The others move": [passes, passes, projected],
        "On the way back": [back, back, projected],
    }
    assert verdicts(page) == expected["A clear move"], "the page starts with the first"
    assert page.locator("#presets button").all_text_contents() == list(expected)
    for name, seen in expected.items():
        page.get_by_role("button", name=name).click()
        assert verdicts(page) == seen, name
        assert page.get_by_role("button", pressed=True).all_text_contents() == [name]
    page.get_by_role("button", name="The others move").click()
    for rule in ("TV of all tokens", "KL of all tokens"):
        page.get_by_label(rule).check()
        assert verdicts(page)[1] == "Masked: no gradient"


def probabilities(page: Any, which: str) -> list[float]:
    column = {"old": 2, "next": 3}[which]
    return [float(text) for text in page.locator(f"tbody td:nth-child({column})").all_text_contents()]


def centre(page: Any, handle: str) -> tuple[float, float]:
    box = page.locator(f"{handle} .dot").bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


@pytest.mark.browser
@pytest.mark.parametrize("which", ["old", "next"])
@pytest.mark.parametrize("method", ["clip", "dppo", "troll"])
def test_dragging_moves_the_policy_and_every_number(page: Any, method: str, which: str) -> None:
    page.locator(f"#{method}-panel").scroll_into_view_if_needed()
    before, shown = probabilities(page, which), page.locator(".numbers dd").all_text_contents()
    x, y = centre(page, f"svg[data-method={method}] .handle.{which}")
    page.mouse.move(x + 3, y - 2)
    page.mouse.down()
    page.mouse.move(x + 13, y - 32, steps=4)
    page.mouse.up()
    page.mouse.move(x + 100, y + 100)  # let go: nothing follows any more
    after = probabilities(page, which)
    # The triangle's height is one unit of the top token's probability: 30 pixels up, whatever the window's size.
    height = page.locator(f"svg[data-method={method}] .frame").bounding_box()["height"]
    assert after[0] - before[0] == pytest.approx(30 / height, abs=0.003)
    assert sum(after) == pytest.approx(1, abs=0.002)
    assert page.locator(".numbers dd").all_text_contents() != shown
    assert page.locator("#says").text_content().startswith("Your own two policies")
    places = page.locator(f".handle.{which}").evaluate_all("all => all.map(one => one.getAttribute('transform'))")
    assert len(places) == 3
    assert len(set(places)) == 1, "the three panels show one pair of policies"


@pytest.mark.browser
def test_a_finger_drags_too(open_page: Callable[..., Any]) -> None:
    page = open_page(390, 844, has_touch=True, is_mobile=True)
    page.locator("#clip-panel .triangle").scroll_into_view_if_needed()
    before, scroll = probabilities(page, "next"), page.evaluate("scrollY")
    x, y = centre(page, "#clip-panel .handle.next")
    touch = page.context.new_cdp_session(page)
    for kind, up in (("touchStart", 0), ("touchMove", 20), ("touchMove", 40)):
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": x, "y": y - up}]})
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    assert probabilities(page, "next")[0] > before[0] + 0.05
    assert page.evaluate("scrollY") == scroll, "the handle moves, not the page"


@pytest.mark.browser
def test_a_handle_cannot_leave_the_triangle(page: Any) -> None:
    page.locator("#dppo-panel .triangle").scroll_into_view_if_needed()
    for dx, dy in ((-2000, 2000), (2000, 2000), (0, -2000), (-2000, 0)):
        page.mouse.move(*centre(page, "#dppo-panel .handle.next"))
        page.mouse.down()
        page.mouse.move(640 + dx, 450 + dy, steps=3)
        page.mouse.up()
        policy = page.evaluate("state.next")
        assert min(policy) >= 1e-4 - 1e-15
        assert math.isclose(sum(policy), 1, abs_tol=1e-12)
        text = page.locator("main").inner_text() + page.locator("svg.triangle").first.inner_html()
        assert not re.search(r"NaN|Infinity|undefined", text)


@pytest.mark.browser
def test_everything_can_be_done_by_keys(page: Any) -> None:
    start = probabilities(page, "next")
    handle = page.locator("#clip-panel .handle.next")
    handle.focus()
    page.keyboard.press("ArrowUp")
    assert probabilities(page, "next") == pytest.approx([start[0] + 0.01, start[1] - 0.005, start[2] - 0.005], abs=2e-3)
    page.keyboard.press("Shift+ArrowRight")
    assert probabilities(page, "next") == pytest.approx([start[0] + 0.01, start[1] - 0.055, start[2] + 0.045], abs=2e-3)
    spoken = re.findall(r"[\d.]+", handle.get_attribute("aria-valuetext"))
    assert [float(one) for one in spoken] == probabilities(page, "next")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "clip"
    page.keyboard.press("ArrowRight")
    assert page.locator("#clip-value").text_content() == "0.205"
    assert "0.795 … 1.205" in page.locator("#clip-panel .numbers").inner_text()
    page.get_by_label("positive").focus()
    page.keyboard.press("ArrowRight")
    assert page.get_by_label("negative").is_checked()
    page.locator("#spoken", has_text="clip: ").wait_for(state="attached")
    assert page.locator("#spoken").get_attribute("aria-live") == "polite"


@pytest.mark.browser
def test_each_slider_moves_its_own_region(page: Any) -> None:
    drawn = "() => [...document.querySelectorAll('.triangle .region')].map((path) => path.getAttribute('d'))"
    for index, slider in enumerate(("clip", "delta", "bound")):
        before = page.evaluate(drawn)
        page.locator(f"#{slider}").fill("0.3")
        assert [one != other for one, other in zip(before, page.evaluate(drawn), strict=True)] == [i == index for i in range(3)]
    page.get_by_label("KL of this token").check()
    assert page.locator("#delta-value").text_content() == "0.050", "each divergence keeps its own bound"
    page.get_by_label("TV of this token").check()
    assert page.locator("#delta-value").text_content() == "0.300"


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 820, 1440])
def test_it_fits_every_screen(open_page: Callable[..., Any], width: int, scheme: str) -> None:
    page = open_page(width, 900, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ink, paper = (
        [int(one) for one in re.findall(r"\d+", page.evaluate(f"getComputedStyle(document.body).{key}"))]
        for key in ("color", "backgroundColor")
    )
    assert (sum(ink) > sum(paper)) is (scheme == "dark")
    tops = [page.locator(f"#{name}-panel").bounding_box()["y"] for name in ("clip", "dppo", "troll")]
    assert (len(set(tops)) == 1) is (width >= 960), "side by side where there is room, one below the other elsewhere"


@pytest.mark.browser
def test_the_address_holds_the_state_and_a_corner_can_be_seen_from_near(open_page: Callable[..., Any]) -> None:
    """A link shows what its sender saw; what makes no sense in one is left out; zoomed, handles are as large, and move less."""
    page = open_page()
    page.get_by_role("button", name="A rare token rises").click()
    page.check("input[name=zoom][value='16']")
    page.locator("#clip").fill("0.5")
    page.check("input[name=tokens][value='5']")
    page.check("input[name=support][value=union]")
    page.locator("#tail").fill("0.1")
    page.wait_for_timeout(400)
    said = page.evaluate("location.hash")
    assert said.startswith("#old=0.6,0.39,0.01&new=0.58,0.37,0.05&token=2&advantage=1&clip=0.5")
    assert said.endswith("&tokens=5&tail=0.1&support=union")
    width = page.evaluate("document.querySelector('#clip-panel .triangle').viewBox.baseVal.width")
    assert width == pytest.approx(452 / 16)
    before = page.locator("#clip-panel .handle.old .dot").bounding_box()["width"]
    page.evaluate("location.hash = 'old=.2,.3,.5&new=2,x,-1&zoom=4'")
    assert page.evaluate("location.hash") != said, "only two policies are a state"
    assert page.evaluate("[state.zoom, state.old]") == [16, [0.6, 0.39, 0.01]]
    page.evaluate(
        "location.hash = 'old=.2,.3,.5&new=.3,.3,.4&token=7&clip=99&rule=kl,full&zoom=1&tokens=2&tail=1&support=union'"
    )
    page.wait_for_timeout(100)
    state = page.evaluate("state")
    assert (state["old"], state["token"], state["clip"], state["zoom"]) == (pytest.approx([0.2, 0.3, 0.5]), 0, 0.2, 1)
    assert state["rule"] == {"divergence": "kl", "estimator": "full"}
    assert (state["tokens"], state["tail"], state["support"]) == (2, 0.15, "union")
    assert page.locator("#clip-panel .handle.old .dot").bounding_box()["width"] == pytest.approx(before, abs=0.5)


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_and_controls_stand_out(open_page: Callable[..., Any], scheme: str) -> None:
    assert open_page(color_scheme=scheme).evaluate(CONTRAST) == []
