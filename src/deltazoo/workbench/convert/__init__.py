"""Conversion: train a model whose softmax attention was replaced by delta-rule layers, and rank layers to replace.

``deltazoo.swap`` replaces the layers.
"""
