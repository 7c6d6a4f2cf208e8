"""Grammars that answers have to follow, compiled and followed by llguidance in processes of their own.

A caller's grammar may take any amount of time, memory and stack. So each grammar of a tenant has a process that is
bounded in all three, which dies alone. `GrammarCompiler` is the servers' side.
"""
