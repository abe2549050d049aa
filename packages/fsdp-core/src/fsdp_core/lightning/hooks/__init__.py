"""What users and Lightning do to a sharded module beside its steps: calls, exports, callbacks."""
