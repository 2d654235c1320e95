"""What the tests of training share: a policy that can be computed by hand, and the rollouts of one small step."""

from types import SimpleNamespace

import torch
from helpers import check_close, tiny_model
from torch import Tensor, nn

from grpo.config import GrpoConfig
from grpo.rollout import Rollouts
from grpo.update import update_policy
from model.lora import add_lora, lora_parameters
from model.qwen2 import Qwen2

PROMPTS = [[3, 4, 5], [6], [3, 4, 5], [7, 8], [9, 10, 11, 12]]
LENGTHS = [[1, 6, 2], [3, 6, 6], [2, 2, 5], [4, 1, 6], [6, 3, 2]]  # six is the limit: those are truncated
ADVANTAGES = torch.tensor([[1.0, -0.5, -0.5], [0.3, 0.9, -1.2], [0.0, 0.0, 0.0], [-1.0, 2.0, -1.0], [0.5, -0.7, 0.2]])


class TablePolicy(nn.Module):
    """Row i of the table (V, V) holds the logits of what follows token i; it is the only parameter.

    It has the four members of `model.Qwen2` that scoring and updating call. Nothing but the input token matters, so
    a sequence that is shifted by one reads the wrong row at once.
    """

    def __init__(self, table: Tensor):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=len(table))
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding.from_pretrained(table.clone(), freeze=False)

    @property
    def table(self) -> nn.Parameter:
        return self.model.embed_tokens.weight

    def prefill(self, prompt_ids: Tensor, lengths: Tensor) -> None:
        """Nobody looks back at a prompt: every branch brings the prompt's last token along."""

    def extend(self, input_ids: Tensor, positions: Tensor, prompt: None, row_prompt: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)  # (B, T, V)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def logprob(self, previous: int, token: int) -> float:
        """The slow, obvious value of one scored position."""
        return self.table[previous].log_softmax(dim=0)[token].item()


def random_policy(size: int = 7) -> TablePolicy:
    return TablePolicy(2 * torch.randn(size, size))


def make_rollouts() -> Rollouts:
    """Five groups of three random completions, 55 tokens; group 2 is flat, and its prompt is that of group 0."""
    generator = torch.Generator().manual_seed(0)
    ids = [[torch.randint(40, (n,), generator=generator).tolist() for n in group] for group in LENGTHS]
    logprobs = [[(-4 * torch.rand(n, generator=generator)).tolist() for n in group] for group in LENGTHS]
    return Rollouts(PROMPTS, ids, logprobs, [[n < 6 for n in group] for group in LENGTHS], [[1.0] * 3] * 5)


def lora_model(scale: float = 0.3) -> Qwen2:
    """A model with an adapter that, but for scale 0, has been trained for a while."""
    model, generator = tiny_model(), torch.Generator().manual_seed(1)
    add_lora(model, r=2, alpha=4.0, generator=generator)
    for name, parameter in lora_parameters(model).items():
        if name.endswith("lora_B"):
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)
    return model


def settings(**changes) -> GrpoConfig:
    """[grpo] for that step: no gradient clipping, a temperature other than one; keywords change a value."""
    base = {"max_completion_length": 6, "epsilon_high": 0.28, "max_grad_norm": 1e9, "temperature": 0.8}
    return GrpoConfig(**base | changes)


def gradient(model, config: GrpoConfig, groups=(0, 1, 2, 3, 4), rate: float = 0.0, **more) -> tuple[dict, dict]:
    """The gradient of an update's last iteration, by parameter name, and the update's metrics; plain SGD."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=rate)
    rollouts, advantages = make_rollouts().select(list(groups)), ADVANTAGES[list(groups)]
    totals = update_policy(model, optimizer, rollouts, advantages, config, **more)
    return {name: p.grad.clone() for name, p in trained.items()}, totals


def check_same(actual: dict, expected: dict, hint: str) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        check_close(torch.as_tensor(actual[name]), torch.as_tensor(value), f"{name}: {hint}", rtol=1e-4, atol=1e-5)
