"""What every model owes: a chain of layers that are built one by one and cost what capture says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dejavu.foundation.tracing.recurrent import RecurrentLayer
from dejavu.graphs.capture import capture
from dejavu.init import Draw, draw_layer
from dejavu.testing.expect import expect
from dejavu.workload import Workload
from dejavu.workload.data import dataset_of
from dejavu.workload.models import layers_of


def _lstm_flops(inputs: tuple[int, int, int], _: Any, recurrent_weight: tuple[int, int], *__: Any, **___: Any) -> float:
    return RecurrentLayer(*inputs, recurrent_weight[1]).forward_flops()


_NO_FORMULA_OF_TORCH: dict[Any, Any] = {torch.ops.aten.mkldnn_rnn_layer: _lstm_flops}


def check_model(workload: Workload) -> None:
    """Hold a workload's model to every case of this file; small settings, for it is run on the CPU.

        check_model(Workload(model="mine", model_options={"width": 32}, batch_size=4, num_microbatches=2))

    Raises:
        AssertionError: it breaks one of them.
        InputError, CaptureError: the model cannot be built, or not be captured.
    """
    for case in CASES:
        case(workload)


def drawn_layers(workload: Workload) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of each layer, with the framework's default weights."""
    builders = layers_of(workload)
    for position, builder in enumerate(builders):
        yield builder.name, draw_layer(builder, Draw(), position=position, depth=len(builders))


def capture_tells_what_its_layers_do(workload: Workload) -> None:
    """Names, weights, shapes and operations are those of the real modules on a real microbatch."""
    graph, modules = capture(workload), dict(drawn_layers(workload))
    found = [layer.name for layer in graph.layers]
    expect(found == list(modules), f"{workload.model}: captured as the layers {found}; it builds {list(modules)}")
    held = sum(p.numel() * p.element_size() for module in modules.values() for p in module.parameters())
    expect(graph.parameter_bytes == held, f"{workload.model}: captured with {graph.parameter_bytes} bytes, has {held}")
    x, target = dataset_of(workload).batch(0, workload.microbatch_size, seed=0)
    for layer in graph.layers:
        # The math path counts attention's two products.
        counting = FlopCounterMode(display=False, custom_mapping=_NO_FORMULA_OF_TORCH)
        with counting as counter, sdpa_kernel(SDPBackend.MATH):
            x = modules[layer.name](x)
        told, size, flops = (
            f"{workload.model}, layer {layer.name!r}",
            x.numel() * x.element_size(),
            layer.flops("forward"),
        )
        expect(isinstance(x, torch.Tensor), f"{told}: it returns a {type(x).__name__}; wanted one tensor")
        expect(layer.output_shape == tuple(x.shape), f"{told}: captured {layer.output_shape}, returns {tuple(x.shape)}")
        expect(layer.output_bytes == size, f"{told}: captured {layer.output_bytes} bytes, returns {size}")
        expect(flops == counter.get_total_flops(), f"{told}: captured {flops} FLOP, does {counter.get_total_flops()}")
    expect(len(target) == workload.microbatch_size, f"{workload.model}: {len(target)} targets of a microbatch")


def layers_share_a_signature_where_they_do_the_same(workload: Workload) -> None:
    """Whatever they are called; and no others do, nor the same ones on more examples."""
    graph, described = capture(workload), dict[str, object]()
    for layer in graph.layers:
        expect(
            described.setdefault(layer.signature, layer.operators) == layer.operators,
            f"{workload.model}, layer {layer.name!r}: it has the signature of a layer that does something else",
        )
    larger = capture(workload.model_copy(update={"batch_size": workload.batch_size * 2}))
    for one, two in zip(graph.layers, larger.layers, strict=True):
        expect(
            one.signature != two.signature or not one.flops("forward"),
            f"{workload.model}, layer {one.name!r}: twice the examples have the same signature",
        )


def layers_can_be_built_alone_and_again(workload: Workload) -> None:
    """A stage builds its own layers only: names differ, and a layer's weights do not depend on who built before."""
    builders = layers_of(workload)
    names = [builder.name for builder in builders]
    expect(len(set(names)) == len(names), f"{workload.model}: layers are called {names}; wanted each name once")
    whole = dict(drawn_layers(workload))
    for position, builder in reversed(list(enumerate(builders))):
        alone = draw_layer(builder, Draw(), position=position, depth=len(builders)).state_dict()
        same = all(torch.equal(value, alone[name]) for name, value in whole[builder.name].state_dict().items())
        expect(same, f"{workload.model}, layer {builder.name!r}: built alone, it has other weights")


CASES: tuple[Callable[[Workload], None], ...] = (
    capture_tells_what_its_layers_do,
    layers_share_a_signature_where_they_do_the_same,
    layers_can_be_built_alone_and_again,
)
