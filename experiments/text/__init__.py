"""The suite `text`: every rule, softmax attention and hybrids as language models of one size on real text.

`building` makes the text from installed packages, `text_recipe` fixes sizes and schedule, `suite` trains what a result
file lacks, `text_page` makes the page from that file alone.
"""
