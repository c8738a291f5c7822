"""Make layers of a trained softmax model linear, as many as a budget allows, and prove it on data it has not seen.

samples      the data, cut into three parts: fit, choose, prove
checking     the samples fit the model
metrics      perplexity, masked tokens, cosine, accuracy: harm in pairs, with intervals
layers       the attention layers of a model: replace one, restore all (layers_transformers, layers_images)
places       where attention sits in a model of images, and how a layer there is replaced
stand_ins    what takes the place of a softmax: a mechanism, what it learns, a local residual
candidates   the mechanisms that are tried
fitting      what candidates learn from the outputs of the softmax, batch by batch
choosing     the damage of each layer alone, and how many fit into the budget
shortcut     a layer alone is measured without the blocks before it
healing      the whole model learns again what the original says
recall       what a causal model generates: does it find what it read far back?
proving      what comes after the choice: heal, prove, generate
cost         seconds and bytes of both models as inputs grow
document     every number, and the verdict
page         the page with figures
saving       a complete folder, or none
rebuilding   models of images on the disk, and `load_converted`
pipeline     all of it, resumable: `convert`, `Conversion`
"""
