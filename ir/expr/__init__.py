"""Expressions: element types, value expressions, index expressions, symbolic sizes, monoids."""
