"""Instruments that look into the attention of a model: ours, timm's, Hugging Face's, or your own.

    capture         record q, k and v of every attention call of a model
    layer           one recorded call: its scores, weights and output
    examination     measure every layer of a model in one pass over its images
    findings        the results of an examination, and the report that `softless probe` writes
    injectivity     which queries share a row of weights, and when none can (InLine, Figure 2, Propositions 1 to 3)
    locality        how much attention stays in a query's neighborhood (InLine, Figure 3)
    score_range     how far scores spread, and what a first-order kernel would cost there
    approximation   the distance of a mechanism's weights from softmax's, against the range of the scores
    interventions   accuracy after attention is edited: neighbors hidden, queries confused (InLine, Tables 1 and 2)
    running         means and 95 % confidence intervals from samples that arrive batch by batch

`watching`, `trails` and `products` recognize softmax attention in models that are not ours.
"""
