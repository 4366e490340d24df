"""Drawing weights, the space of draws, and which of them are tried."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import named
from dejavu.init import (
    MENU,
    PROPOSERS,
    SCHEMES,
    Dimension,
    Draw,
    Probe,
    Scored,
    Space,
    calibrate,
    draw_layer,
    space_of,
)
from dejavu.init.output_scale import LINEAR_MAPS
from dejavu.init.space import CHAIN_DIMENSIONS, DIMENSIONS
from dejavu.launch.launcher import launch
from dejavu.runtime.single import train_single
from dejavu.runtime.training import Layers, build_layers
from dejavu.workload import TrialSettings, Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import LayerBuilder, layers_of
from tests.conftest import spread
from tests.launching import job_of
from tests.own_models import OnTables
from tests.test_models import ZOO, small

CPU = torch.device("cpu")
EVERYTHING = Draw("default", 0.7, slope=1.5, embedding=0.3, head=0.5, residual=0.4, bias=0.25, seed=3)
SPACE = Space(MENU)
CHAIN = Space(MENU, tuple(CHAIN_DIMENSIONS.values()), is_chain=True)
every_model = pytest.mark.parametrize("name", ZOO)
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)
every_proposer = pytest.mark.parametrize("name", PROPOSERS)


def weights(name: str, draw: Draw) -> dict[str, torch.Tensor]:
    return build_layers(ZOO[name], draw, CPU).state_dict()


@every_model
@every_scheme
def test_every_stage_draws_the_same_weights_as_the_whole(name: str, scheme: str) -> None:
    workload = ZOO[name]
    draw = replace(EVERYTHING, scheme=scheme)
    before = torch.random.get_rng_state()
    whole = build_layers(workload, draw, CPU).state_dict()
    parts = {
        **build_layers(workload, draw, CPU, 0, 2).state_dict(),
        **build_layers(workload, draw, CPU, 2).state_dict(),
    }
    assert torch.equal(before, torch.random.get_rng_state())
    assert list(parts) == list(whole)
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


@every_scheme
def test_seeds_and_gains_matter(scheme: str) -> None:
    builder = layers_of(ZOO["user"])[1]
    place = {"position": 1, "depth": 4}
    one, other = (draw_layer(builder, Draw(scheme, seed=seed), **place).weight for seed in (0, 1))
    twice = draw_layer(builder, Draw(scheme, 2.0, seed=0), **place).weight
    assert not torch.equal(one, other)
    assert torch.allclose(twice, 2 * one)


DEVIATIONS: dict[str, Callable[[int, int], float]] = {  # of a matrix with this fan-in and fan-out
    "default": lambda fan_in, fan_out: 1 / math.sqrt(3 * fan_in),  # torch's Linear: Kaiming, uniform, a = sqrt(5)
    "uniform": lambda fan_in, fan_out: 1 / math.sqrt(fan_in),
    "normal": lambda fan_in, fan_out: 0.02,
    "truncated_normal": lambda fan_in, fan_out: 1 / math.sqrt(fan_in),
    "kaiming": lambda fan_in, fan_out: math.sqrt(2 / fan_in),
    "xavier": lambda fan_in, fan_out: math.sqrt(2 / (fan_in + fan_out)),
    "orthogonal": lambda fan_in, fan_out: 1 / math.sqrt(max(fan_in, fan_out)),
    "depth_scaled": lambda fan_in, fan_out: 0.02,
    "lsuv": lambda fan_in, fan_out: 1 / math.sqrt(max(fan_in, fan_out)),
}


def wide(kind: str) -> nn.Module:
    return nn.Linear(300, 200) if kind == "linear" else nn.Conv2d(30, 200, 3)


@every_scheme
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_deviations_are_as_published(scheme: str, kind: str) -> None:
    builder = LayerBuilder("layer", lambda: wide(kind))
    weight = draw_layer(builder, Draw(scheme, seed=5), position=1, depth=3).weight.detach()
    fans = (300, 200) if kind == "linear" else (270, 1800)
    if scheme in {"orthogonal", "lsuv"}:
        fans = (weight[0].numel(), 200)
        rows = weight.flatten(1) if fans[0] > 200 else weight.flatten(1).T
        assert torch.allclose(rows @ rows.T, torch.eye(len(rows)), atol=1e-4)
    expected = DEVIATIONS[scheme](*fans)
    assert weight.std().item() == pytest.approx(expected, rel=0.02)
    assert abs(weight.mean().item()) < 0.02 * expected
    if scheme == "uniform":
        assert weight.abs().max().item() <= math.sqrt(3 / fans[0])
    if scheme == "truncated_normal":
        assert weight.abs().max().item() <= 2 * expected / 0.8796


@every_model
@every_scheme
def test_vectors_stay_as_the_constructor_left_them(name: str, scheme: str) -> None:
    plain, drawn = weights(name, Draw(seed=3)), weights(name, Draw(scheme, seed=3))
    assert all(torch.equal(plain[key], drawn[key]) for key in plain if plain[key].dim() < 2)
    if scheme != "default":
        assert all(not torch.equal(plain[key], drawn[key]) for key in plain if plain[key].dim() >= 2)


@every_scheme
def test_what_is_frozen_stays_as_the_constructor_left_it(scheme: str) -> None:
    """A trial would train on a backbone of noise; whole numbers and truth values are in no scheme's reach."""
    workload = Workload(model="tests.own_models:on_tables", data="digits", batch_size=12, num_microbatches=2)
    draw = replace(EVERYTHING, scheme=scheme)
    layers = build_layers(workload, draw, CPU)
    if SCHEMES[scheme].calibrated:
        calibrate(layers, dataset_of(workload).batch(0, 8, seed=0)[0])
    given, drawn = OnTables(), layers[1]
    assert isinstance(drawn, OnTables) and drawn.trained.weight.dtype == torch.float32
    for name, weight in given.named_parameters():
        assert torch.equal(drawn.get_parameter(name), weight) != weight.requires_grad, name


def expected_factor(name: str, draw: Draw, position: int, depth: int) -> float:
    """Of a weight of the small GPT, by its name in the whole model."""
    layer, _, rest = name.partition(".")
    slope = draw.gain * draw.slope ** (position / (depth - 1) - 0.5)
    if "norm" in rest:
        return 1.0
    if rest.endswith("bias"):
        return draw.bias
    if layer == "embedding":
        return draw.embedding
    if layer == "head":
        return draw.head
    return slope * draw.residual if rest in {"projection.weight", "contract.weight"} else slope


@every_scheme
def test_each_factor_is_on_its_role(scheme: str) -> None:
    plain, drawn = (weights("gpt", draw) for draw in (Draw(scheme, seed=3), replace(EVERYTHING, scheme=scheme)))
    layers = [builder.name for builder in layers_of(ZOO["gpt"])]
    for name, weight in drawn.items():
        position = layers.index(name.partition(".")[0])
        factor = expected_factor(name, EVERYTHING, position, len(layers))
        assert torch.allclose(weight, factor * plain[name], rtol=1e-5, atol=1e-9), name


@pytest.mark.parametrize("name", ["gpt", "bert", "t5", "t5_gated", "moe"])
def test_depth_scaled_makes_what_is_added_to_the_stream_smaller(name: str) -> None:
    normal, scaled = (build_layers(ZOO[name], Draw(scheme, seed=1), CPU) for scheme in ("normal", "depth_scaled"))
    builders, smaller = layers_of(ZOO[name]), 0
    for builder, one, other in zip(builders, normal, scaled, strict=True):
        for key, weight in one.named_parameters():
            is_residual = key.removesuffix(".weight") in builder.residual
            smaller += is_residual
            factor = 1 / math.sqrt(2 * len(builders)) if is_residual else 1.0
            assert torch.allclose(other.get_parameter(key), factor * weight, rtol=1e-5), key
    assert smaller >= 4


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_the_slope_goes_through_all_layers(depth: int) -> None:
    draw = Draw(gain=0.8, slope=2.0)
    gains = [draw.factor("hidden", position=p, depth=depth) for p in range(depth)]
    assert math.prod(gains) ** (1 / depth) == pytest.approx(0.8)
    if depth > 1:
        assert gains[-1] / gains[0] == pytest.approx(2.0)
        assert np.diff(np.log(gains)) == pytest.approx(math.log(2.0) / (depth - 1))


def test_the_one_layer_of_a_model_is_no_head() -> None:
    """A user's model that cannot be cut: the gain is on all its matrices."""
    whole = small("tests.own_models:Branching", {}, data="digits")
    assert [builder.name for builder in layers_of(whole)] == ["model"]
    plain, drawn = (build_layers(whole, Draw("xavier", gain, head=0.1), CPU).state_dict() for gain in (1.0, 0.5))
    assert all(torch.allclose(drawn[key], 0.5 * plain[key]) for key in plain if plain[key].dim() >= 2)
    assert [one.name for one in space_of(whole).dimensions] == ["gain", "bias"]


def test_shared_weights_are_drawn_once() -> None:
    """Twice multiplied they would be a quarter."""
    plain, drawn = (weights("user_tied", Draw("xavier", gain)) for gain in (1.0, 0.5))
    tied = [key for key in plain if key.startswith("1-3.") and plain[key].dim() >= 2]
    assert tied and all(torch.allclose(drawn[key], 0.5 * plain[key]) for key in tied)


def test_biases_can_be_none() -> None:
    for key, value in weights("mlp", Draw("kaiming", bias=0.0)).items():
        assert key.endswith("weight") or not value.any()


@pytest.mark.parametrize(
    "build",
    [
        partial(nn.LSTM, 3, 4, num_layers=2, bidirectional=True),
        partial(nn.GRUCell, 3, 4),
        partial(nn.RNN, 3, 4),
        partial(nn.MultiheadAttention, 4, 2),
        partial(nn.Conv2d, 3, 4, 3),
    ],
    ids=lambda build: build.func.__name__,
)
def test_biases_are_known_whatever_a_module_calls_them(build: partial[nn.Module]) -> None:
    plain, drawn = (
        draw_layer(LayerBuilder("layer", build), Draw(bias=bias, seed=3), position=1, depth=3).state_dict()
        for bias in (1.0, 0.5)
    )
    assert any("bias" in key for key in plain)
    for key, value in plain.items():
        assert torch.equal(drawn[key], value * 0.5 if "bias" in key else value)


def outputs_of(module: Layers, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """What each linear map gives less its bias."""
    found: dict[str, torch.Tensor] = {}
    hooks = []
    for name, part in module.named_modules():
        if isinstance(part, LINEAR_MAPS):

            def keep(part: nn.Module, arguments: tuple, output: torch.Tensor, name: str = name) -> None:
                shape = (-1, *(1,) * (part.weight.dim() - 2))
                found[name] = output if part.bias is None else output - part.bias.view(shape)

            hooks.append(part.register_forward_hook(keep))
    with torch.no_grad():
        module(inputs)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("name", ["gpt", "bert", "t5_gated", "cnn", "mlp", "vgg", "wide_resnet", "user"])
def test_lsuv_gives_every_linear_map_a_unit_deviation(name: str) -> None:
    workload = ZOO[name]
    module = build_layers(workload, Draw("lsuv", 0.3, slope=3.0), CPU)
    inputs, _ = dataset_of(workload).batch(0, 16, seed=0)
    buffers = {key: value.clone() for key, value in module.named_buffers()}
    vectors = {key: value.clone() for key, value in module.named_parameters() if value.dim() < 2}
    before = torch.random.get_rng_state()
    calibrate(module, inputs)
    assert torch.equal(before, torch.random.get_rng_state())
    assert module.training and not any(part._forward_hooks for part in module.modules())
    assert all(torch.equal(value, buffers[key]) for key, value in module.named_buffers())
    assert all(torch.equal(module.get_parameter(key), value) for key, value in vectors.items())
    found = outputs_of(module, inputs)
    assert len(found) >= 3
    for key, output in found.items():
        assert output.std(correction=0).item() == pytest.approx(1.0, abs=1e-3), key


def test_lsuv_leaves_what_has_no_deviation() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with torch.no_grad():
        module[0].weight.zero_()
        module[1].weight.fill_(1.0)
    calibrate(module, torch.randn(8, 3, generator=torch.Generator().manual_seed(0)))
    assert not module[0].weight.any() and torch.equal(module[1].weight, torch.ones(2, 4))


def test_lsuv_trains_from_the_calibrated_weights_and_goes_on_from_saved_ones(tmp_path: Path) -> None:
    workload, draw, state = ZOO["mlp"], Draw("lsuv", seed=2), tmp_path / "state.safetensors"
    before = torch.random.get_rng_state()
    whole = train_single(workload, draw, range(4))
    first = train_single(workload, draw, range(2), save_to=state)
    assert first + train_single(workload, draw, range(2, 4), start_from=state) == whole
    module = build_layers(workload, draw, CPU)
    inputs, targets = dataset_of(workload).batch(0, workload.batch_size, seed=workload.seed)
    calibrate(module, inputs)
    assert nn.functional.cross_entropy(module(inputs), targets).item() == pytest.approx(whole[0], rel=1e-5)
    torch.random.set_rng_state(before)


def test_a_stage_cannot_calibrate(tmp_path: Path, tiny: Workload) -> None:
    job = replace(job_of(tiny, tmp_path), draw=Draw("lsuv"))
    with pytest.raises(InputError, match="the scheme 'lsuv' rescales weights by a batch through the whole model"):
        launch(job)
    with pytest.raises(InputError, match="unknown scheme 'lusv'; did you mean 'lsuv'"):
        launch(replace(job, draw=Draw("lusv")))


@every_model
def test_a_space_has_the_dimensions_that_change_something(name: str) -> None:
    """Each of them does, and what is left out does not."""
    before = torch.random.get_rng_state()
    space = space_of(ZOO[name])
    assert torch.equal(before, torch.random.get_rng_state())
    assert space.schemes == MENU and space.num_dimensions <= 8
    plain, chosen = weights(name, Draw()), {one.name for one in space.dimensions}
    for dimension in DIMENSIONS:
        changed = weights(name, replace(Draw(), **{dimension.name: 0.5}))
        changes = any(not torch.equal(changed[key], plain[key]) for key in plain)
        assert changes == (dimension.name in chosen), dimension.name


@pytest.mark.parametrize("scheme", MENU)
def test_a_chain_at_the_critical_gain_keeps_its_activations(scheme: str) -> None:
    """Through thirty wide layers; away from it they grow or vanish. Deviations that ignore the width have none."""
    gain = SCHEMES[scheme].critical_gain
    if gain is None:
        assert scheme in ("normal", "depth_scaled")
        return
    builder, depth, x = LayerBuilder("layer", partial(nn.Linear, 512, 512, bias=False)), 30, torch.randn(64, 512)
    mean_squares = []
    for factor in (0.7, 1.0, 1.4):
        found = x
        for k in range(depth):
            draw = Draw(scheme, gain=factor * gain, seed=k)
            found = draw_layer(builder, draw, position=1, depth=3)(found.relu())
        mean_squares.append(float(found.detach().square().mean()))
    assert mean_squares[0] < 1e-6 and 0.1 < mean_squares[1] < 10 and mean_squares[2] > 1e6


def test_only_a_bare_chain_is_one() -> None:
    spaces = {name: space_of(workload) for name, workload in ZOO.items()}
    assert {name for name, space in spaces.items() if space.is_chain and not name.startswith("user")} <= {
        "mlp",
        "vgg",
        "cnn_plain",
    }
    assert spaces["mlp"].is_chain and not spaces["gpt"].is_chain and not spaces["cnn"].is_chain


def test_only_schemes_that_follow_the_width_are_scaled_in_a_chain() -> None:
    """The others are tried as published; where nothing else is left to try they are scaled all the same."""
    fixed = {"normal", "depth_scaled"}
    assert SPACE.scaled_schemes == MENU
    assert set(CHAIN.scaled_schemes) == set(MENU) - fixed
    assert Space(("normal",), CHAIN.dimensions, is_chain=True).scaled_schemes == ("normal",)
    draws = named(PROPOSERS, "mixed").propose(CHAIN, 40, seed=0)
    assert {draw.scheme for draw in draws[:8]} == set(MENU)
    assert {draw.scheme for draw in draws[8:]} == set(MENU) - fixed


def test_points_and_draws_are_inverse() -> None:
    random = np.random.default_rng(0)
    for space in (SPACE, Space(("xavier",), DIMENSIONS[:2]), Space(("xavier", "lsuv"), ()), CHAIN):
        for point in random.random((200, space.num_dimensions)):
            draw = space.draw(point, 7)
            back = space.point(draw)
            assert space.draw(back, 7) == draw
            assert back[1:] == pytest.approx(point[1:], abs=2e-3)
            assert abs(back[0] - point[0]) <= 0.5 / len(space.scaled_schemes)
            unit = (space.is_chain and SCHEMES[draw.scheme].critical_gain) or 1.0
            for one in space.dimensions:
                value = getattr(draw, one.name) / (unit if one.name == "gain" else 1.0)
                assert one.least * (1 - 1e-3) <= value <= one.most * (1 + 1e-3)
    edges = [SPACE.draw(np.full(SPACE.num_dimensions, x), 0) for x in (0.0, math.nextafter(1.0, 0.0))]
    assert [edges[0].gain, edges[1].gain, edges[0].bias, edges[1].bias] == [0.15, 2.8, 0.0, 1.0]
    for edge in edges:
        assert (SPACE.point(edge) < 1.0).all() and SPACE.draw(SPACE.point(edge), 0) == edge
    assert SPACE.draw(SPACE.point(Draw("kaiming")), 0) == Draw("kaiming")  # as published lies inside


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Space(()), "schemes is empty"),
        (lambda: Space(("xavier", "javier")), "unknown scheme 'javier'; did you mean 'xavier'"),
        (lambda: Space(("xavier", "xavier")), "schemes are xavier, xavier; wanted each of them once"),
        (lambda: Dimension("gain", 2.0, 1.0), "gain goes from 2.0 to 1.0, where no draw is valid"),
        (lambda: Dimension("gain", 0.1, math.inf), "wanted two finite numbers"),
        (lambda: Dimension("gain", math.nan, 1.0), "wanted two finite numbers"),
        (lambda: Dimension("gain", 0.0, 1.0), "gain begins at 0.0; wanted a factor > 0"),
        (lambda: Dimension("bias", -1.0, 1.0, log=False), "wanted a factor ≥ 0"),
        (lambda: Dimension("seed", 1.0, 2.0), "a dimension 'seed'; wanted one of gain, slope"),
        (lambda: named(PROPOSERS, "cube"), "unknown proposer 'cube'; wanted one of mixed"),
        (lambda: space_of(Workload(trials=TrialSettings(schemes=()))), "schemes is empty"),
        (lambda: space_of(Workload(trials=TrialSettings(schemes=("he",)))), "unknown scheme 'he'"),
    ],
)
def test_mistakes_are_named(make: Callable, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def score_of(draw: Draw) -> float:
    """A smooth landscape with its lowest point at one of eight schemes; part of it fails."""
    if draw.gain > 2.5:
        return math.inf
    far = math.log(draw.gain / 0.6) ** 2 + 0.5 * math.log(draw.head / 0.2) ** 2 + 0.3 * math.log(draw.slope / 1.6) ** 2
    return far + 0.1 * math.log(draw.residual / 0.4) ** 2 + {"kaiming": 0.0, "orthogonal": 0.3}.get(draw.scheme, 0.8)


def search(name: str, count: int, seed: int, space: Space = SPACE) -> list[Scored]:
    """All draws of a proposer on the landscape above, batch by batch, each checked."""
    known: list[Scored] = []
    proposer = PROPOSERS[name]
    for size in proposer.batches(count):
        draws = proposer.propose(space, size, seed=seed, known=tuple(known))
        assert len(draws) == size
        known += [Scored(draw, score_of(draw)) for draw in draws]
    return known


@every_proposer
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 9, 40])
def test_proposals_repeat_and_are_all_different(name: str, count: int) -> None:
    tried = [one.draw for one in search(name, count, seed=5)]
    assert len(tried) == (min(count, 1) if name == "single" else count) == sum(PROPOSERS[name].batches(count))
    assert tried == [one.draw for one in search(name, count, seed=5)]
    assert [draw.seed for draw in tried] == list(range(5, 5 + len(tried)))
    if name not in {"random", "latin_hypercube"}:
        assert tried[:1] == [Draw(seed=5)][:count]
    for draw in tried:
        assert Draw(**asdict(draw)) == draw
        assert all(one.least <= getattr(draw, one.name) <= one.most for one in DIMENSIONS)
    if count > 2 and name not in {"single", "seeds", "families"}:
        other = [one.draw for one in search(name, count, seed=6)]
        assert [replace(draw, seed=0) for draw in other[1:]] != [replace(draw, seed=0) for draw in tried[1:]]


@every_proposer
def test_every_proposal_can_be_drawn(name: str) -> None:
    space = space_of(ZOO["gpt"])
    for one in search(name, 12, seed=1, space=space):
        assert all(value.isfinite().all() for value in weights("gpt", one.draw).values())


@every_proposer
def test_a_space_of_one_scheme_and_nothing_else_will_do(name: str) -> None:
    tried = [one.draw for one in search(name, 9, seed=1, space=Space(("xavier",), ()))]
    assert {draw.scheme for draw in tried} <= {"default", "xavier"}


@pytest.mark.parametrize("name", spread(["mixed", "random", "latin_hypercube", "families", "seeds", "adaptive"], 1))
def test_a_hundred_thousand_are_no_trouble(name: str) -> None:
    tried = PROPOSERS[name].propose(SPACE, PROPOSERS[name].batches(100_000)[0], seed=0)
    assert len(set(tried)) == len(tried) == PROPOSERS[name].batches(100_000)[0]


def test_a_large_batch_by_scores_takes_several_at_a_time() -> None:
    tried = [one.draw for one in search("bayesian", 400, seed=0)]
    assert len(set(tried)) == 400


@pytest.mark.parametrize("name", ["adaptive", "bayesian"])
def test_where_all_draws_failed_the_next_are_anywhere(name: str) -> None:
    known = [Scored(draw, math.inf) for draw in PROPOSERS[name].propose(SPACE, 10, seed=0)]
    draws = PROPOSERS[name].propose(SPACE, 10, seed=0, known=known)
    assert len({draw.scheme for draw in draws}) > 3 and len(set(draws)) == 10


@pytest.mark.parametrize("name", ["adaptive", "bayesian"])
def test_scores_lead_to_better_draws_than_chance(name: str) -> None:
    best = {which: [min(one.score for one in search(which, 40, k)) for k in range(24)] for which in (name, "random")}
    assert np.mean(best[name]) < 0.6 * np.mean(best["random"])


def test_the_refining_boxes_halve() -> None:
    known = search("adaptive", 40, seed=3)
    assert PROPOSERS["adaptive"].batches(40) == (20, 10, 10)
    for start, side in ((20, 0.5), (30, 0.25)):
        best = min(known[:start], key=lambda one: one.score).draw
        points = np.array([SPACE.point(one.draw) for one in known[start : start + 10]])
        assert {one.draw.scheme for one in known[start : start + 10]} == {best.scheme}
        assert (np.ptp(points[:, 1:], axis=0) <= side + 2e-3).all()
        assert (np.abs(points[:, 1:] - SPACE.point(best)[1:]) <= side + 2e-3).all()


def test_the_coarse_grid_has_every_scheme() -> None:
    draws = PROPOSERS["adaptive"].propose(SPACE, 25, seed=0)[1:]
    assert {(draw.scheme, draw.gain) for draw in draws} == {
        (scheme, gain) for scheme in MENU for gain in {draw.gain for draw in draws}
    }
    assert len({draw.gain for draw in draws}) == 3 and {draw.head for draw in draws} == {1.0}


@pytest.mark.parametrize(("count", "num_families"), [(1, 1), (2, 1), (5, 1), (16, 3), (40, 8), (100, 20)])
def test_a_fifth_of_the_mixture_are_published_schemes(count: int, num_families: int) -> None:
    draws = PROPOSERS["mixed"].propose(SPACE, count, seed=0)
    plain = [draw == Draw(draw.scheme, seed=draw.seed) for draw in draws]
    assert plain == [True] * num_families + [False] * (count - num_families)
    assert {draw.scheme for draw in draws[:num_families]} == set(MENU[:num_families])
    if count == 40:
        points = np.array([SPACE.point(draw) for draw in draws[8:]])[:, 1:]
        slices = np.sort((points * 32).astype(int), axis=0)
        assert np.abs(slices - np.arange(32)[:, None]).max() <= 1  # one in each slice, but for the rounding of factors


def test_the_filter_takes_small_losses_with_large_gradients() -> None:
    draws = [Draw(seed=k) for k in range(6)]
    values = [(2.0, 1.0), (1.0, 3.0), (3.0, 9.0), (math.nan, 50.0), (0.5, 0.1), (9.0, math.inf)]
    probes = [Probe(draw, loss, norm) for draw, (loss, norm) in zip(draws, values, strict=True)]
    proposer = PROPOSERS["loss_and_gradient"]
    # Ranks by loss: 4, 1, 0, 2; by gradient norm: 2, 1, 0, 4. Sums: draw 1 has 2; 2 and 4 have 3; 0 has 4.
    assert [draw.seed for draw in proposer.choose(probes, 4)] == [1, 4, 2, 0]
    assert [draw.seed for draw in proposer.choose(probes, 5)] == [1, 4, 2, 0, 3]
    assert proposer.num_probed(5) == 20 and PROPOSERS["mixed"].num_probed(5) == 0
