"""Differential privacy as functions of numbers and tensors: clipping, noise, the accountant.

Nothing here knows a method, a client or a server.
"""
