"""Modules that the APIs of all frameworks share. Only those named ``keras_`` import a framework."""
