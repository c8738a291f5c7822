"""A training of four updates, for tests of commands: the recipe, and the words that ask for it."""

FOUR_UPDATES = """
command = "softless train --recipe tiny.toml --data flowers"
image_size = 8
batch = 4
epochs = 2
warmup_epochs = 0
lr = 1e-3
log_every = 1
[model]
name = "inline_deit_tiny"
patch_size = 4
dims = 8
depths = 1
heads = 2
[augment]
operations = 0
"""


def words(*more):
    return ["train", "--recipe", "tiny.toml", "--data", "flowers", *more]
