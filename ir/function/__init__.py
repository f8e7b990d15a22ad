"""Fused tensor functions: what one kernel computes, before any loop order is chosen."""
