"""Grammars that answers have to follow, by llguidance; another library may take its place behind `GrammarState`."""

from outrider.grammar.compiler import GrammarCompiler

__all__ = ["GrammarCompiler"]
