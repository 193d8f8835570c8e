"""What a model's answer is made of: reasoning, text and tool calls, told apart as it comes."""
