"""The suite `text-conversions`: the softmax model of the suite `text`, converted to hybrids and to delta-rule layers.

`conversion_recipe` fixes what is converted and how, `teacher` trains the softmax model, `stages` converts a copy of it,
`conversion_suite` does what a result file lacks, `conversion_page` makes the page from that file.
"""
