"""Language models of one size on real text: every rule, softmax attention, hybrids; a softmax model converted."""
