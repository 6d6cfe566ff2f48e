"""Splits models of other libraries into chunks: one subpackage per library, each with its own extra."""
