"""Make layers of a trained softmax model linear, as many as a budget allows, and prove it on data it has not seen.

samples      the data, cut into three parts: fit, choose, prove
metrics      perplexity, masked tokens, cosine, accuracy: harm in pairs, with intervals
layers       the attention layers of a model of transformers: replace one, restore all
candidates   the mechanisms that are tried
fitting      what candidates learn from the outputs of the softmax, batch by batch
choosing     the damage of each layer alone, and how many fit into the budget
cost         seconds and bytes of both models as inputs grow
document     every number, and the verdict
page         the page with figures
saving       a folder that loads with `from_pretrained`, or none
pipeline     all of it, resumable: `convert`, `Conversion`
"""
