"""Linear attention: every token adds its value under its key, and nothing is ever erased.

    S_t = S_{t-1} + k_t v_t^T

This is the lower bound of every comparison, since it cannot overwrite. DeltaNet puts the correction `v_t - S^T k_t` in
the place of `v_t`. The feature map is SiLU after the short convolution, as in all our rules, so that comparisons change
the rule alone; the paper's is `1 + elu`. There is no denominator: the output norm takes its place, as is usual since
arXiv:2210.10340.

Paper: Katharopoulos et al. 2020, arXiv:2006.16236.
"""

from deltazoo.spec import RuleSpec, register_rule

LINEAR_ATTENTION = register_rule(
    RuleSpec(
        name="linear_attention",
        paper="Transformers are RNNs, arXiv:2006.16236",
        summary="Adds without erasing: the baseline every delta rule improves on.",
        equation="S_t = S_{t-1} + k_t v_t^T",
        step_size="none",
        normalize_q=False,
        normalize_k=False,
        paper_shape={"learning_rate": 3e-4},
    )
)
