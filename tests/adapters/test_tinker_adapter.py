"""FSPO through the client of tinker: what it sends to the server is FSPO's weights, the gradient is FSPO's.

The client's own code makes the log-probs' leaves, differentiates and builds the request; a small model here
answers in the place of the server, with the loss that the client's source names, Σ −weight·log π.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tinker import TensorData, types
from tinker.lib.public_interfaces.training_client import TrainingClient
from torch import Tensor

from megatron_fspo.adapters.tinker import fspo_loss
from megatron_fspo.losses import FSPOLoss

PROMPT = 3
# The last response is empty: all of its tokens are masked.
LENGTHS = [20, 5, 1, 12, 9, 4]


class Server(torch.nn.Module):
    """A language model without attention, enough to have log-probs and a gradient."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = torch.nn.Parameter(torch.randn(11, 11, generator=generator))

    def forward(self, datum: types.Datum) -> Tensor:
        """log π [T] of the targets."""
        targets = datum.loss_fn_inputs["target_tokens"].to_torch()
        return self.table[datum.model_input.to_ints()].log_softmax(dim=-1)[range(len(targets)), targets]


def make_data(server: Server) -> list[types.Datum]:
    """As the cookbook's ``trajectory_to_data`` has them: prompts have 0 in all three float tensors."""
    generator = torch.Generator().manual_seed(1)
    data = []
    for number, length in enumerate(LENGTHS):
        tokens = torch.randint(0, 11, (PROMPT + length + 1,), generator=generator)
        response = (torch.arange(PROMPT + length) >= PROMPT).float()
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
            loss_fn_inputs={"target_tokens": TensorData.from_torch(tokens[1:])},
        )
        with torch.no_grad():
            sampled = server(datum) + 0.05 * torch.randn(PROMPT + length, generator=generator)
        advantage = torch.randn((), generator=generator)
        inputs = {
            "logprobs": sampled * response,
            "advantages": advantage * response,
            "mask": response * (number < len(LENGTHS) - 1),
        }
        more = {name: TensorData.from_torch(value) for name, value in inputs.items()}
        data.append(types.Datum(model_input=datum.model_input, loss_fn_inputs=datum.loss_fn_inputs | more))
    return data


def forward_backward_custom(server: Server, data: list[types.Datum], loss: Any) -> Any:
    """The client's way of a custom loss, requests left out: what it would have the server backpropagate."""
    sent = TrainingClient._get_custom_loss_forward_data(None, data, "cross_entropy")
    with torch.no_grad():
        rows = [{"logprobs": TensorData.from_torch(server(datum))} for datum in sent]
    answer = types.ForwardBackwardOutput(
        loss_fn_output_type="TensorData", loss_fn_outputs=rows, metrics={"loss:sum": 0.0}
    )
    result = TrainingClient._compute_custom_loss(data, loss, answer)
    for datum in result.data:
        (-server(datum) * datum.loss_fn_inputs["weights"].to_torch()).sum().backward()
    return result


BANDS = [pytest.param({}, id="defaults"), pytest.param({"c_high": 0.01, "c_dual": 0.012}, id="dual clip")]


@pytest.mark.parametrize("limits", BANDS)
def test_the_gradient_is_that_of_the_definition(limits: dict[str, float]) -> None:
    server = Server()
    data, exact = make_data(server), copy.deepcopy(server).double()
    forward_backward_custom(server, data, fspo_loss(**limits))
    objectives = []
    for datum in data:
        inputs = {name: value.to_torch() for name, value in datum.loss_fn_inputs.items()}
        kept = inputs["mask"] > 0
        if kept.any():
            new = exact(datum)[kept]
            log_ratio = new - inputs["logprobs"].double()[kept]
            definition = FSPOLoss(**limits).definition(log_ratio, inputs["advantages"][-1].item(), new)
            objectives.append(definition.objective.sum())
    (-torch.stack(objectives).mean()).backward()
    largest = exact.table.grad.abs().max()
    assert (server.table.grad - exact.table.grad).abs().max() < 3e-6 * largest


def test_two_calls_before_a_step_are_one() -> None:
    one, two = Server(), Server()
    data = make_data(one)
    forward_backward_custom(one, data, fspo_loss())
    for part in (data[:2], data[2:]):
        forward_backward_custom(two, part, fspo_loss(num_sequences=5))
    torch.testing.assert_close(two.table.grad, one.table.grad, rtol=1e-5, atol=1e-7)


def changed(datum: types.Datum, **inputs: Tensor | None) -> types.Datum:
    kept = {name: value for name, value in datum.loss_fn_inputs.items() if name not in inputs}
    new = {name: TensorData.from_torch(value) for name, value in inputs.items() if value is not None}
    return types.Datum(model_input=datum.model_input, loss_fn_inputs=kept | new)


@pytest.mark.parametrize(
    ("inputs", "found"),
    [
        ({"mask": None}, "datum 1 has no 'mask' in loss_fn_inputs, only "),
        ({"logprobs": torch.zeros(3)}, r"datum 1: logprobs has shape \[3\], but its log-probs \[8\]"),
        ({"advantages": torch.arange(8.0)}, "one advantage for all tokens of a response"),
    ],
    ids=["no mask", "too short", "advantages by token"],
)
def test_what_does_not_fit_is_refused_in_one_line(inputs: dict[str, Tensor | None], found: str) -> None:
    server = Server()
    data = make_data(server)
    data[1] = changed(data[1], **inputs)
    with pytest.raises(ValueError, match=found) as error:
        forward_backward_custom(server, data, fspo_loss())
    assert "\n" not in str(error.value)
