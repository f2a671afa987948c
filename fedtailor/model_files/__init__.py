"""From a run to models in use: export, model files, prediction, adaptation."""
