"""What users and Lightning do with a sharded module outside its steps: calls, exports, callbacks."""
