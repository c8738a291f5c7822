"""The public names are the documented ones, their examples run, and mechanisms are plain values."""

import copy
import dataclasses
import doctest
import inspect
import math
import pickle
import pkgutil
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

import softless
from tests.numerics.cases import CASES

ROOT = Path(__file__).parents[2]

SIGNATURES = {
    "attention": "q, k, v, mechanism='inline', *, is_causal=False, key_mask=None, bias=None, scale=None, inputs=None, "
    "grid=None, backend='auto'",
    "attention_weights": "q, k, mechanism='inline', *, is_causal=False, key_mask=None, bias=None, scale=None, "
    "inputs=None, grid=None, backend='auto'",
    "attention_with_state": "q, k, v, mechanism='inline', state=None, *, key_mask=None, scale=None, inputs=None, "
    "grid=None, backend='auto'",
    "mechanism": "name, **options",
    "list_mechanisms": "",
    "threshold_report": "q, k, *, tau=1.0, expansion='max', tail='drop', is_causal=False, key_mask=None, bias=None, "
    "scale=None",
    "create_model": "name, *, mechanism=None, local=None, window=None, pattern=None, num_classes=1000, img_size=None, "
    "device=None, dtype=None, **options",
    "list_models": "",
    "nn.Attention": "dim, heads, mechanism='inline', local=False, *, kv_heads=None, window=None, shifted=False, "
    "qkv_bias=True, attn_drop=0.0, proj_drop=0.0",
