"""An engine on llama.cpp, for models and devices that the compiled engine does not run."""
