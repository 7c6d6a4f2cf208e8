"""The pure part: tree, noise, acceptance, growth, control. No network, no store, no torch."""
