"""Log-probabilities of answers against a float64 recomputation from the model's own logits."""

import pytest
import torch
from accelerate import Accelerator
from tiny_agents import tiny_policy

from hacpo_trl.backends.log_probabilities import completion_logps, prepare_policy, score
from hacpo_trl.rollouts.rows import pad_sequences


PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11]]
ANSWERS = [[12, 13], [14, 15, 16, 17], [18]]


def expected(policy, prompt, answer, temperature):
    """log π(y), token by token, of one sequence alone, without padding, at a temperature."""
    with torch.no_grad():
        logits = policy(input_ids=torch.tensor([prompt + answer])).logits[0].double() / temperature
    return logits.log_softmax(-1)[torch.arange(len(prompt) - 1, len(prompt) + len(answer) - 1), answer]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_scores_are_log_probabilities_at_the_sampling_temperature(temperature, batch_size):
    policy = tiny_policy(32)
    wanted = [expected(policy, p, a, temperature) for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    prepare_policy(policy, temperature)
    policy.train()
    scores = score(Accelerator(cpu=True), policy, PROMPTS, ANSWERS, pad_token_id=0, batch_size=batch_size)
    assert policy.training
    for one, other in zip(scores, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-5)


def test_gradient_and_entropy():
    """The gradient of a sum of log-probabilities, and the entropy of each prediction, by float64 autograd."""
    policy = tiny_policy(32)
    reference = tiny_policy(32).double()
    prepare_policy(policy, 0.7)
    batch = pad_sequences(PROMPTS, ANSWERS, pad_token_id=0)
    logps, entropies, mask = completion_logps(policy, batch)
    assert (logps[~mask] == 0).all() and (entropies[~mask] == 0).all()
    logps.sum().backward()

    total, wanted_entropies = 0.0, []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        logits = reference(input_ids=torch.tensor([prompt + answer])).logits[0] / 0.7
        distribution = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        total = total + distribution[torch.arange(len(answer)), answer].sum()
        wanted_entropies.append(-(distribution.exp() * distribution).sum(-1).detach())
    total.backward()
    torch.testing.assert_close(entropies[mask].double(), torch.cat(wanted_entropies), rtol=0, atol=1e-5)
    for (name, parameter), other in zip(policy.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.double(), other.grad, rtol=1e-4, atol=1e-5, msg=name)
