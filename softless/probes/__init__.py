"""Instruments: what a mechanism costs, how far it is from softmax, which queries it confuses, where it looks.

    examine       every layer of a model, in one pass over its images
    capture       q, k, v of every attention call of a model, ours or not
    confusion     how many queries share a row (InLine, Figure 2)
    propositions  when none can, and a pair that does where one can (Propositions 1 to 3)
    locality      whether neighbors are looked at (Figure 3)
    score_range   what the scores allow a linear kernel
    masking       what a model loses without its neighbors (Table 2)
    induced       what it loses when its queries are confused (Table 1)

Every probe takes tensors (or shapes) or a captured layer, and returns a frozen dataclass; `running` gives means their
confidence intervals, over samples that arrive in any portions. The other files measure time and memory.
"""
