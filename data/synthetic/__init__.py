"""The generated corpus that the embedded target is trained on: dialogues, word problems, lists, code."""
