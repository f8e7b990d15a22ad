"""Attention in graphs that hold forward and backward, and softmaxes of shifted rows."""
