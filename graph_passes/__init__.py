"""Passes on onnx-ir models, and the plan that turns a schedule into variants and segments."""
