import math

import pytest
import torch
from tiny_agents import run_config

from hacpo_trl.algorithm.alignment import Alignment
from hacpo_trl.algorithm.objective import (
    cross_lower_bound,
    cross_objective,
    is_one,
    kl_to_reference,
    own_objective,
    sampler_weights,
    sequence_log_ratio,
    token_objective,
)
from hacpo_trl.learner import learner_objective, log_objective
from hacpo_trl.reporting.metrics import Metrics


def t(*values, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def value_and_gradient(function, *values):
    """The values of a function of a float64 vector, and the gradient of their sum."""
    x = t(*values, grad=True)
    y = function(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    return y.tolist(), gradient.tolist()


# ---- the sequence ratio (Eq. 11) ------------------------------------------------------------------------------------
def test_log_ratio_by_the_sources_count_and_by_own_counts():
    # log π_k = -12 over the learner's 6 tokens, log π_j = -10 over the source's 4.
    # "source": (-12 + 10) / 4 = -0.5;   "own": -12/6 + 10/4 = +0.5.
    sums = t(-12.0), t(-10.0), torch.tensor([6]), torch.tensor([4])
    assert sequence_log_ratio(*sums).tolist() == [-0.5]
    assert sequence_log_ratio(*sums, normalization="source").tolist() == [-0.5]
    assert sequence_log_ratio(*sums, normalization="own").tolist() == [0.5]


def test_log_ratio_by_bytes():
    # 18 bytes, and texts of 3 bytes a token in the learner's tokens: (-12 + 10) / (18 / 3) = -1/3. Equal text
    # likelihood is a ratio of 1 however either side cuts the text.
    counts = torch.tensor([6, 5]), torch.tensor([4, 9])
    found = sequence_log_ratio(t(-12.0, -7.5), t(-10.0, -7.5), *counts, "bytes", t(18.0, 21.0) / 3)
    assert found.tolist() == pytest.approx([-1 / 3, 0.0])
    assert sequence_log_ratio(t(-7.5), t(-7.5), counts[0][1:], counts[1][1:], "own").tolist() != [0.0]


def test_normalizations_agree_on_own_rollouts():
    counts = torch.tensor([4, 7, 1])
    new, old = t(-6.0, -3.5, -2.0), t(-4.0, -7.0, -2.0)
    for normalization in ("source", "own"):
        # -2/4, 3.5/7, 0/1
        assert sequence_log_ratio(new, old, counts, counts, normalization).tolist() == [-0.5, 0.5, 0.0]


@pytest.mark.parametrize(("normalization", "divisor"), [("source", 4), ("own", 6)])
def test_gradient_of_the_log_ratio_is_one_over_the_divisor(normalization, divisor):
    def log_ratio(x):
        return sequence_log_ratio(x, t(-10.0), torch.tensor([6]), torch.tensor([4]), normalization)

    assert value_and_gradient(log_ratio, -12.0)[1] == pytest.approx([1 / divisor])
    assert torch.autograd.gradcheck(log_ratio, t(-12.0, grad=True))


@pytest.mark.parametrize("normalization", ["source", "own"])
def test_lengths_1_and_100_with_equal_mean_log_ratio_weigh_the_same(normalization):
    # Mean log-ratio -0.1 in both. A token's gradient is 1/|y| of the sequence's, over |y| tokens.
    short, long = torch.full((1,), -1.1, dtype=torch.float64), torch.full((100,), -1.1, dtype=torch.float64)
    short.requires_grad_(), long.requires_grad_()
    sums, counts = torch.stack([short.sum(), long.sum()]), torch.tensor([1, 100])
    ratio = sequence_log_ratio(sums, t(-1.0, -100.0), counts, counts, normalization).exp()
    assert ratio.tolist() == pytest.approx([math.exp(-0.1)] * 2)
    for objective in (
        own_objective(ratio, t(1.0, 1.0), 0.2, 0.2),
        cross_objective(ratio, t(1.0, 1.0), t(1.0, 1.0), 1.0, 0.2),
    ):
        assert objective[0].item() == pytest.approx(objective[1].item())
        of_short, of_long = torch.autograd.grad(objective.sum(), (short, long), retain_graph=True)
        assert of_long.sum().item() == pytest.approx(of_short.item())
        assert of_long.tolist() == pytest.approx([of_short.item() / 100] * 100)
        assert of_short.item() != 0


def test_ratio_of_an_empty_side_is_finite():
    log_ratio = sequence_log_ratio(t(0.0), t(-3.0), torch.tensor([0]), torch.tensor([0]), "own")
    assert log_ratio.isfinite().all()


# ---- own rollouts: GSPO and GRPO ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "gradient"),
    [
        # Clip range [0.9, 1.2]. The gradient is that of s·A where the minimum takes it, and 0 where it takes the clip.
        (1.0, 2.0, 2.0, 2.0),
        (1.1, -1.0, -1.1, -1.0),
        (0.8, 1.0, 0.8, 1.0),  # min(0.8, 0.9)
        (0.8, -1.0, -0.9, 0.0),  # min(-0.8, -0.9)
        (1.3, 1.0, 1.2, 0.0),  # min(1.3, 1.2)
        (1.3, -1.0, -1.3, -1.0),  # min(-1.3, -1.2)
        (1.3, 0.0, 0.0, 0.0),
    ],
)
def test_own_objective_on_both_sides_and_signs(ratio, advantage, objective, gradient):
    values, gradients = value_and_gradient(lambda s: own_objective(s, t(advantage), 0.1, 0.2), ratio)
    assert values == pytest.approx([objective]) and gradients == pytest.approx([gradient])


def test_own_objective_gradcheck():
    s, advantages = t(0.8, 1.1, 1.3, 0.7, 1.3, grad=True), t(1.0, -1.0, 0.5, -2.0, -1.0)
    assert torch.autograd.gradcheck(lambda s: own_objective(s, advantages, 0.1, 0.2), s)


@pytest.mark.parametrize(
    ("mode", "low", "high", "weights"),
    [
        # Ratios of the tokens: 2, 1/2, 4; of the answer: 4.
        ("token_truncate", None, 3.0, [2, 0.5, 3]),
        ("token_truncate", 1.0, 3.0, [2, 1, 3]),
        ("token_mask", None, 3.0, [2, 0.5, 0]),
        ("token_mask", 1.0, None, [2, 0, 4]),
        ("sequence_truncate", None, 3.0, [3, 3, 3]),
        ("sequence_truncate", 5.0, None, [5, 5, 5]),
        ("sequence_mask", None, 3.0, [0, 0, 0]),
        ("sequence_mask", None, 5.0, [4, 4, 4]),
        ("sequence_mask", 4.5, None, [0, 0, 0]),
    ],
)
def test_sampler_weights_by_hand(mode, low, high, weights):
    logps = torch.tensor([-1.0, -1.0, -1.0])
    sampler_logps = logps - torch.tensor([2.0, 0.5, 4.0]).log()
    torch.testing.assert_close(sampler_weights(logps, sampler_logps, mode, low, high), torch.tensor(weights).float())


def test_a_sampler_that_agrees_is_within_bounds_of_1():
    logps = torch.tensor([-1.0, -2.0])
    for mode in ("token_mask", "sequence_mask"):
        assert sampler_weights(logps, logps, mode, 1.0, 1.0).tolist() == [1.0, 1.0]


def test_gspos_clip_range_by_default():
    args = run_config()
    s = t(1 - 2.9e-4, 1 - 3.1e-4, 1 + 3.9e-4, 1 + 4.1e-4, grad=True)
    own_objective(s, t(-1.0, -1.0, 1.0, 1.0), args.epsilon, args.epsilon_high).sum().backward()
    assert s.grad.tolist() == [-1.0, 0.0, 1.0, 0.0]


def test_token_objective_by_hand():
    ratio = torch.tensor([[0.5, 1.5, 9.0], [0.5, 1.5, 1.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    objective = token_objective(ratio, mask, t(1.0, -2.0), 0.2, 0.28)
    # Row 0, A = 1: min(0.5, 0.8) = 0.5 and min(1.5, 1.28) = 1.28; mean of the two that are its tokens: 0.89.
    # Row 1, A = -2: min(-1, -1.6) = -1.6, min(-3, -2.56) = -3, -2; mean -6.6 / 3 = -2.2.
    assert objective.tolist() == pytest.approx([0.89, -2.2])
    objective.sum().backward()
    expected = [0.5, 0, 0, 0, -2 / 3, -2 / 3]
    assert ratio.grad.flatten().tolist() == pytest.approx(expected)


def test_token_objective_of_one_token_and_with_weights_by_hand():
    ratio = torch.tensor([[0.5, 9.0], [0.9, 1.5]], dtype=torch.float64)
    mask = torch.tensor([[True, False], [True, True]])
    # Row 0 is its one token's; row 1, A = -2: (-1.8 - 3) / 2.
    assert token_objective(ratio, mask, t(1.0, -2.0), 0.2, 0.28).tolist() == pytest.approx([0.5, -2.4])
    weights = torch.tensor([[3.0, 9.0], [0.5, 2.0]], dtype=torch.float64)
    # 3 x 0.5; (0.5 x -1.8 + 2 x -3) / 2.
    objective = token_objective(ratio, mask, t(1.0, -2.0), 0.2, 0.28, weights)
    assert objective.tolist() == pytest.approx([1.5, -3.45])


def test_token_objective_gradcheck():
    ratio = torch.tensor([[0.5, 1.5, 0.9], [0.6, 1.4, 1.1]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    assert torch.autograd.gradcheck(lambda r: token_objective(r, mask, t(1.0, -2.0), 0.2, 0.28), ratio)


# ---- peers' rollouts (Eq. 10, 12, 13, 14) ---------------------------------------------------------------------------
def cross(log_s, alpha=1.0, weight=1.0, advantage=1.0, lower_bound=0.2):
    weights, advantages = torch.full_like(log_s, weight), torch.full_like(log_s, advantage)
    return cross_objective(log_s.exp(), advantages.detach(), weights.detach(), alpha, lower_bound)


@pytest.mark.parametrize(("alpha", "objective"), [(0.0, -1.0), (1.0, -0.5), (3.0, -0.125)])
def test_cross_objective_by_hand(alpha, objective):
    # s = 0.5, ω = 2, A = -1: s · s^α · ω · A = 0.5 · 0.5^α · 2 · -1
    values, gradients = value_and_gradient(lambda x: cross(x, alpha, 2.0, -1.0), math.log(0.5))
    assert values == pytest.approx([objective])
    # d/d log s = s · sg(s)^α · ω · A: the same number. A factor s^α that were not stopped would make it (1 + α) times
    # as large.
    assert gradients == pytest.approx([objective])


def test_the_gradient_reaches_each_token_by_the_analytic_formula():
    # One rollout: the learner's 3 tokens, the source's 4. d objective / d logp_t = s·sg(s)^α·ω·A / 4.
    logps = torch.tensor([[-0.5, -1.0, -1.5]], dtype=torch.float64, requires_grad=True)
    log_ratio = sequence_log_ratio(logps.sum(-1), t(-2.0), torch.tensor([3]), torch.tensor([4]))
    objective = cross_objective(log_ratio.exp(), t(-0.7), t(1.6), 2.0, 0.2)
    objective.sum().backward()
    s = math.exp((-3 + 2) / 4)
    assert objective.item() == pytest.approx(s**3 * 1.6 * -0.7)
    assert logps.grad[0].tolist() == pytest.approx([s * s**2 * 1.6 * -0.7 / 4] * 3)


def test_cross_gradcheck_without_damping():
    x = t(math.log(0.1), math.log(0.3), -0.1, 0.2, grad=True)
    for lower_bound in (0.2, None):
        assert torch.autograd.gradcheck(lambda x, bound=lower_bound: cross(x, 0.0, 2.0, -1.0, bound), x)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("alpha", [0.0, 1.0, 3.0])
def test_the_clip_discards_below_the_bound_and_above_one(alpha, advantage):
    inside = [0.201, 0.5, 0.999, 1.0]
    outside = [1e-6, 0.199, 1.001, 50.0]
    _, gradients = value_and_gradient(lambda x: cross(x, alpha, 2.0, advantage), *map(math.log, inside))
    assert gradients == pytest.approx([s ** (1 + alpha) * 2 * advantage for s in inside])
    _, gradients = value_and_gradient(lambda x: cross(x, alpha, 2.0, advantage), *map(math.log, outside))
    assert gradients == [0.0] * 4


def test_clipped_values():
    # s = 0.1: clipped to 0.2, damped by 0.1. s = 1.5: clipped to 1, not damped.
    values, _ = value_and_gradient(lambda x: cross(x, 1.0, 3.0, 1.0), math.log(0.1), math.log(1.5))
    assert values == pytest.approx([0.2 * 0.1 * 3, 3.0])


def test_without_clip_nothing_is_discarded_and_only_unlikely_rollouts_are_damped():
    values, gradients = value_and_gradient(
        lambda x: cross(x, 2.0, 3.0, 1.0, lower_bound=None), math.log(0.1), math.log(1.5)
    )
    # 0.1 · 0.1² · 3 and 1.5 · 1 · 3; with s^α undamped above 1 it would be 1.5³ · 3.
    assert values == pytest.approx([0.003, 4.5]) and gradients == pytest.approx([0.003, 4.5])


@pytest.mark.parametrize(
    ("delta", "delta_step", "update", "bound"),
    [
        (0.2, 0.025, 0, 0.8),
        (0.2, 0.025, 8, 1.0),
        (0.2, 0.025, 9, 1.0),  # 0.8 + 0.225 would be above the upper bound
        (0.8, 0.025, 0, 0.2),
        (0.8, 0.025, 3, 0.275),
        (0.8, 0.025, 32, 1.0),
        (0.8, 0.025, 40, 1.0),  # 0.2 + 1 = 1.2 would be above the upper bound
        (0.2, 0.025, 2, 0.85),
        (0.2, 0.0, 100, 0.8),
        (1.0, 0.025, 0, 0.0),
    ],
)
def test_stepwise_bound(delta, delta_step, update, bound):
    assert cross_lower_bound(delta, delta_step, update) == pytest.approx(bound)
    assert cross_lower_bound(delta, delta_step, update) <= 1.0


def test_a_bound_of_one_discards_all_but_the_ratio_one():
    _, gradients = value_and_gradient(lambda x: cross(x, lower_bound=cross_lower_bound(0.8, 0.1, 9)), -0.01, 0.0, 0.01)
    assert gradients == [0.0, 1.0, 0.0]


# ---- KL -------------------------------------------------------------------------------------------------------------
def test_k3_by_hand():
    logps, reference = torch.zeros(1, 3).double(), t(math.log(2), -math.log(2), 5.0)[None]
    kl = kl_to_reference(logps, reference, torch.tensor([[True, True, False]]))
    # x = log 2: 2 - log 2 - 1; x = -log 2: 0.5 + log 2 - 1; off the mask: 0.
    assert kl[0].tolist() == pytest.approx([1 - math.log(2), math.log(2) - 0.5, 0.0])


def test_k3_is_unbiased():
    policy, reference = t(0.5, 0.25, 0.25), t(0.25, 0.5, 0.25)
    k3 = kl_to_reference(policy.log(), reference.log(), torch.ones(3, dtype=torch.bool))
    # KL(π ‖ π_ref) = 0.5 log 2 - 0.25 log 2
    assert (policy * k3).sum().item() == pytest.approx(0.25 * math.log(2))
    # Here the other direction, 0.6 log 3 - 0.4 log 2, is another number.
    policy, reference = t(0.8, 0.2), t(0.4, 0.6)
    k3 = kl_to_reference(policy.log(), reference.log(), torch.ones(2, dtype=torch.bool))
    assert (policy * k3).sum().item() == pytest.approx(0.8 * math.log(2) - 0.2 * math.log(3))


def test_kl_gradcheck():
    logps = t(-0.5, -1.0, -3.0, grad=True)
    reference, mask = t(-0.7, -0.2, -4.0), torch.ones(3, dtype=torch.bool)
    assert torch.autograd.gradcheck(lambda x: kl_to_reference(x, reference, mask), logps)


# ---- extremes -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("log_ratio", [-1e4, -100.0, -90.0, 90.0, 100.0, 1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_log_ratios_stay_finite(log_ratio, advantage):
    objectives = {
        "own": lambda s: own_objective(s, torch.tensor([advantage]), 3e-4, 4e-4),
        "cross": lambda s: cross_objective(s, torch.tensor([advantage]), torch.tensor([2.0]), 1.0, 0.2),
        "cross, root": lambda s: cross_objective(s, torch.tensor([advantage]), torch.tensor([2.0]), 0.5, 0.2),
        "cross, no clip": lambda s: cross_objective(s, torch.tensor([advantage]), torch.tensor([2.0]), 0.0, None),
    }
    for name, objective in objectives.items():
        logp = torch.tensor([log_ratio], requires_grad=True)
        one = torch.tensor([1])
        value = objective(sequence_log_ratio(logp, torch.tensor([0.0]), one, one).exp())
        value.sum().backward()
        assert value.isfinite().all() and logp.grad.isfinite().all(), name
    logp = torch.tensor([[log_ratio]], requires_grad=True)
    kl = kl_to_reference(logp, torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool))
    kl.sum().backward()
    assert kl.isfinite().all() and logp.grad.isfinite().all()


# ---- the objective of a batch ---------------------------------------------------------------------------------------
# Five rollouts of up to three tokens: two own ones, three of peers.
LOGPS = [[-1.0, -0.5, -0.3], [-2.0, -0.4], [-0.5, -0.8, -0.6], [-3.0, -2.0], [-0.2]]
OLD_LOGPS = [[-1.0002, -0.4999, -0.3003], [-1.5, -0.5], [-0.4, -0.8, -0.3], [-0.3, -0.2], [-0.9]]
REFERENCE = [[-1.2, -0.5, -0.2], [-1.9, -0.1], None, None, None]
OWN = [True, True, False, False, False]
ADVANTAGE = [1.2, -0.7, 0.9, -1.1, 0.4]
WEIGHT = [1.0, 1.0, 1.5, 0.5, 0.5]
# The sources' token counts: those of own rollouts are the learner's.
OLD_COUNTS = [3, 2, 5, 2, 2]
BYTE_LENGTHS = [2.8, 2.5, 3.5, 1.75, 1.4]


def batch_of_five():
    def padded(rows):
        return torch.tensor([[*(row or []), *[0.0] * (3 - len(row or []))] for row in rows], dtype=torch.float64)

    mask = torch.tensor([[i < len(row) for i in range(3)] for row in LOGPS])
    batch = {
        "is_own": torch.tensor(OWN),
        "advantage": t(*ADVANTAGE),
        "weight": t(*WEIGHT),
        "old_logprob_sum": t(*map(sum, OLD_LOGPS)),
        "old_num_tokens": t(*OLD_COUNTS),
        "byte_length": t(*BYTE_LENGTHS),
        "old_logps": padded(OLD_LOGPS),
        "ref_logps": padded(REFERENCE),
    }
    return batch, padded(LOGPS).requires_grad_(), mask


def clamp(x, low, high):
    return max(low, min(high, x))


def surrogate(s, advantage, args):
    return min(s * advantage, clamp(s, 1 - args.epsilon, 1 + args.epsilon_high) * advantage)


def log_ratio_of(i, logps, args):
    divisors = {
        "source": (OLD_COUNTS[i], OLD_COUNTS[i]),
        "own": (len(logps), OLD_COUNTS[i]),
        "bytes": (BYTE_LENGTHS[i], BYTE_LENGTHS[i]),
    }
    now, then = divisors[args.ratio_normalization]
    return sum(logps) / now - sum(OLD_LOGPS[i]) / then


def by_hand(i, logps, args, update, stopped):
    """The objective of rollout i in plain Python; `stopped` holds the log-probabilities that sg(s) sees."""
    s = math.exp(log_ratio_of(i, logps, args))
    weights = [s] * len(logps)
    if args.algorithm == "grpo":
        weights = [math.exp(new - old) for new, old in zip(logps, OLD_LOGPS[i], strict=True)]
        objective = sum(surrogate(w, ADVANTAGE[i], args) for w in weights) / len(logps)
    elif args.algorithm == "hacpo" and not OWN[i]:
        clipped = clamp(s, min(1, 1 - args.delta + update * args.delta_step), 1) if args.clip_cross else s
        damping = min(1, math.exp(log_ratio_of(i, stopped, args))) ** args.alpha
        objective = clipped * damping * WEIGHT[i] * ADVANTAGE[i]
    else:
        objective = surrogate(s, ADVANTAGE[i], args)
    if args.beta and OWN[i]:
        x = [reference - new for reference, new in zip(REFERENCE[i], logps, strict=True)]
        terms = [math.exp(d) - d - 1 for d in x]
        if args.use_bias_correction_kl:
            terms = [w * kl for w, kl in zip(weights, terms, strict=True)]
        objective -= args.beta * sum(terms) / len(logps)
    return objective


CASES = [
    ({}, 0),
    ({}, 5),
    ({"delta": 0.8}, 0),
    ({"delta": 0.8}, 5),
    ({"delta": 0.2, "delta_step": 0.1}, 1),
    ({"delta_step": 0.0}, 7),
    ({"alpha": 0.0}, 0),
    ({"alpha": 3.0}, 0),
    ({"clip_cross": False, "alpha": 0.5}, 3),
    ({"ratio_normalization": "own"}, 0),
    ({"ratio_normalization": "bytes"}, 0),
    ({"epsilon": 0.3, "epsilon_high": 0.4}, 0),
    ({"beta": 0.3}, 2),
    ({"beta": 0.3, "use_bias_correction_kl": False}, 2),
    ({"algorithm": "naive"}, 0),
    ({"algorithm": "naive", "naive_old_logprobs": "source"}, 3),
    ({"algorithm": "naive", "naive_old_logprobs": "source", "ratio_normalization": "own", "beta": 0.2}, 0),
    ({"algorithm": "naive", "naive_old_logprobs": "source", "epsilon": 0.5}, 0),
    ({"algorithm": "gspo"}, 0),
    ({"algorithm": "gspo", "beta": 0.1}, 1),
    ({"algorithm": "grpo"}, 0),
    ({"algorithm": "grpo", "beta": 0.1}, 0),
    ({"algorithm": "grpo", "beta": 0.1, "use_bias_correction_kl": False, "epsilon": 0.1}, 0),
]


@pytest.mark.parametrize(("settings", "update"), CASES, ids=[str(case) for case in CASES])
def test_learner_objective_against_plain_python(settings, update):
    args = run_config(**settings)
    batch, logps, mask = batch_of_five()
    rows = range(5)
    if not args.shares_rollouts:
        rows = range(2)
        batch, mask = {name: tensor[:2] for name, tensor in batch.items()}, mask[:2]
        logps = logps.detach()[:2].requires_grad_()
    if args.algorithm == "naive" and args.naive_old_logprobs == "learner":
        # The learner recomputes peers' old log-probabilities itself: the ratio of its first update is 1.
        learned = logps.detach().sum(-1)
        batch["old_logprob_sum"] = torch.where(batch["is_own"], batch["old_logprob_sum"], learned)
        batch["old_num_tokens"] = torch.where(batch["is_own"], batch["old_num_tokens"], mask.sum(-1).double())

    terms = learner_objective(args, batch, logps, mask, update)
    if args.algorithm == "naive" and args.naive_old_logprobs == "learner":
        expected = [by_hand(i, LOGPS[i], args, update, LOGPS[i]) for i in (0, 1)] + ADVANTAGE[2:]
        assert terms.objective.tolist() == pytest.approx(expected)
        assert terms.log_ratio[2:].tolist() == [0.0] * 3
        return
    expected = [by_hand(i, LOGPS[i], args, update, LOGPS[i]) for i in rows]
    assert terms.objective.tolist() == pytest.approx(expected, rel=1e-12)
    assert terms.log_ratio.tolist() == pytest.approx([log_ratio_of(i, LOGPS[i], args) for i in rows])

    # The gradient by central differences of the plain function, in which sg(s) stands still.
    (gradient,) = torch.autograd.grad(terms.objective.sum(), logps)
    h = 1e-6
    for i in rows:
        for position in range(len(LOGPS[i])):
            up, down = LOGPS[i].copy(), LOGPS[i].copy()
            up[position] += h
            down[position] -= h
            slope = (by_hand(i, up, args, update, LOGPS[i]) - by_hand(i, down, args, update, LOGPS[i])) / (2 * h)
            assert gradient[i, position].item() == pytest.approx(slope, abs=1e-7)


def test_the_batch_has_a_case_of_each_kind():
    """So that the comparison above means something: which rows move the policy in which setting."""

    def moving(update=0, **settings):
        batch, logps, mask = batch_of_five()
        objective = learner_objective(run_config(**settings), batch, logps, mask, update).objective
        (gradient,) = torch.autograd.grad(objective.sum(), logps)
        return gradient.abs().sum(-1).gt(0).tolist()

    # log s: 0.0001; -0.2; -0.08; -2.25; 0.35. s: 1.0001, 0.819, 0.923, 0.105, 1.42.
    assert moving() == [True, False, True, False, False]
    assert moving(update=30) == [True, False, False, False, False]  # bound 0.95
    assert moving(clip_cross=False) == [True, False, True, True, True]
    assert moving(delta=0.2) == [True, False, True, False, False]
    assert moving(delta=0.2, update=6) == [True, False, False, False, False]  # bound 0.95
    assert moving(beta=0.1) == [True, True, True, False, False]


def test_kl_counts_own_rows_only():
    args = run_config(beta=0.5, use_bias_correction_kl=False)
    batch, logps, mask = batch_of_five()
    batch["ref_logps"][2:] = -9.0  # whatever stands there for peers' rollouts
    terms = learner_objective(args, batch, logps, mask, 0)
    without = learner_objective(run_config(), batch, logps, mask, 0)
    # Row 0: x = -0.2, 0, 0.1; row 1: x = 0.1, 0.3.
    first = (math.exp(-0.2) + 0.2 - 1) + (math.exp(0.1) - 0.1 - 1)
    second = (math.exp(0.1) - 0.1 - 1) + (math.exp(0.3) - 0.3 - 1)
    penalty = without.objective - terms.objective
    assert penalty.tolist() == pytest.approx([0.5 * first / 3, 0.5 * second / 2, 0, 0, 0])
    assert not terms.kl[2:].any()


@pytest.mark.parametrize("algorithm", ["hacpo", "naive", "gspo", "grpo"])
@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_extreme_batches_stay_finite(algorithm, shift):
    args = run_config(algorithm=algorithm, beta=0.1)
    batch, logps, mask = batch_of_five()
    batch = {name: value.float() if value.is_floating_point() else value for name, value in batch.items()}
    logps = torch.where(mask, logps.detach().float() + shift, 0).requires_grad_()
    objective = learner_objective(args, batch, logps, mask, 0).objective
    objective.sum().backward()
    assert objective.isfinite().all() and logps.grad.isfinite().all()


def logged(monkeypatch, update=0, **settings):
    args, metrics = run_config(**settings), Metrics()
    batch, logps, mask = batch_of_five()
    log_objective(metrics, "k", args, batch, learner_objective(args, batch, logps, mask, update), mask)
    monkeypatch.setattr("hacpo_trl.reporting.metrics.gather_object", lambda objects: objects)
    return {name.removeprefix("k/"): value for name, value in metrics.reduce().items()}


def test_logged_ratios_and_clip_fractions(monkeypatch):
    result = logged(monkeypatch)
    own, peers = [math.exp(0.0004 / 3), math.exp(-0.2)], [math.exp(-0.08), math.exp(-2.25), math.exp(0.35)]
    assert result["own_ratio/mean"] == pytest.approx(sum(own) / 2)
    assert result["own_ratio/min"] == pytest.approx(own[1]) and result["own_ratio/max"] == pytest.approx(own[0])
    assert result["cross_ratio/mean"] == pytest.approx(sum(peers) / 3)
    assert result["cross_ratio/min"] == pytest.approx(peers[1])
    assert result["cross_ratio/max"] == pytest.approx(peers[2])
    # Own: row 1 is below 1 - 3e-4 with A < 0. Peers: row 3 is below 0.2, row 4 above 1.
    assert (result["clip_ratio/own_low"], result["clip_ratio/own_high"]) == (0.5, 0.0)
    assert result["clip_ratio/cross_below"] == pytest.approx(1 / 3)
    assert result["clip_ratio/cross_above"] == pytest.approx(1 / 3)


def test_logged_clip_fractions_follow_the_settings(monkeypatch):
    assert logged(monkeypatch, update=30)["clip_ratio/cross_below"] == pytest.approx(2 / 3)  # bound 0.95
    unclipped = logged(monkeypatch, clip_cross=False)
    assert (unclipped["clip_ratio/cross_below"], unclipped["clip_ratio/cross_above"]) == (0.0, 0.0)
    # naive clips peers' rollouts as own ones: row 3 is below with A < 0, row 4 above with A > 0.
    naive = logged(monkeypatch, algorithm="naive", naive_old_logprobs="source")
    assert naive["clip_ratio/cross_below"] == naive["clip_ratio/cross_above"] == pytest.approx(1 / 3)
    kl = logged(monkeypatch, beta=0.5)["kl"]
    x = [-0.2, 0.0, 0.1, 0.1, 0.3]
    assert kl == pytest.approx(sum(math.exp(d) - d - 1 for d in x) / 5)


# ---- alignment (Theorem 4.3) ----------------------------------------------------------------------------------------
def test_alignment_correlates_confidence_with_reward_within_prompts(monkeypatch):
    alignment, metrics = Alignment(), Metrics()
    # Prompt 0: c = 0.1, 0.3, 0.5 with R = 0, 0, 1. Prompt 1: c = 5, 5.2 with R = 1, 0. c is -log s.
    for log_ratio, reward in [(-0.1, 0.0), (-0.3, 0.0), (-0.5, 1.0)]:
        alignment.add("k", "j", 0, log_ratio, reward)
    for log_ratio, reward in [(-5.0, 1.0), (-5.2, 0.0)]:
        alignment.add("k", "j", 1, log_ratio, reward)
    alignment.flush(metrics)
    monkeypatch.setattr("hacpo_trl.reporting.metrics.gather_object", lambda objects: objects)
    # Centered: c = -0.2, 0, 0.2, -0.1, 0.1; R = -1/3, -1/3, 2/3, 1/2, -1/2.
    # Σ c·R = 0.2/3 + 0.4/3 - 0.05 - 0.05 = 0.1; Σ c² = 0.1; Σ R² = 2/3 + 1/2 = 7/6. Over all prompts pooled it would
    # be another number: prompt 1 has the larger c.
    assert metrics.reduce() == {"k/alignment/j": pytest.approx(0.1 / math.sqrt(0.1 * 7 / 6))}
    alignment.flush(metrics)
    assert metrics.reduce() == {}


# ---- a bound of 1 means 1 within rounding -------------------------------------------------------------------------
@pytest.mark.parametrize("update", [0, 40])  # the stepwise bound at 0.2, and at 1
def test_equal_policies_lose_nothing_to_rounding(update):
    """Log-probabilities of one policy in batches of two shapes: half of the ratios come out a little above 1."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(64, 100, generator=generator)
    now = (old + 3e-6 * torch.randn(64, 100, generator=generator)).requires_grad_()
    count = torch.full((64,), 100)
    log_ratio = sequence_log_ratio(now.sum(-1), old.sum(-1), count, count)
    ratio = log_ratio.exp()
    assert (ratio > 1).any() and (ratio < 1).any() and is_one(ratio).all()
    rule = run_config().rule
    below, above = rule.discarded(ratio, torch.ones(64), update)
    assert not below.any() and not above.any()
    rule.cross_objective(ratio, torch.ones(64), torch.ones(64), update).sum().backward()
    assert (now.grad.abs().sum(-1) > 0).all()


def test_beyond_rounding_the_bound_holds():
    ratio = torch.tensor([0.99, 1.0001, 1.5], requires_grad=True)
    rule = run_config().rule
    assert rule.discarded(ratio, torch.ones(3), 40)[0].tolist() == [True, False, False]
    assert rule.discarded(ratio, torch.ones(3), 40)[1].tolist() == [False, True, True]
    rule.cross_objective(ratio, torch.ones(3), torch.ones(3), 0).sum().backward()
    assert (ratio.grad != 0).tolist() == [True, False, False]
