"""Text that sensitivities are measured on: a little of what models are asked for."""

CALIBRATION_TEXT = """\
The harbour was quiet when the ferry came in. Two men threw ropes from the bow, and a woman on the quay caught \
them without looking up from her newspaper. She had done this every morning for eleven years. The engine \
coughed, the water slapped the stone, and then it was still enough to hear the gulls argue over something \
behind the fish market.

"You are late," she said.

"The fog," said the captain. "You could not see your own hand out there. We waited at the buoy until it \
lifted."

She folded the paper. On the front page was a photograph of the new bridge, which was to open in spring, and \
which would make the ferry unnecessary. Neither of them mentioned it.

Photosynthesis turns light into chemical energy. In the first stage, pigments in the thylakoid membranes \
absorb photons and pass electrons along a chain of proteins; water is split, oxygen is released, and the cell \
stores energy as ATP and NADPH. In the second stage, the Calvin cycle, an enzyme called RuBisCO fixes carbon \
dioxide, and sugars are built. Because RuBisCO also reacts with oxygen, some plants have evolved ways to \
concentrate carbon dioxide around it.

def moving_average(values, window):
    \"\"\"Mean of the last `window` values at each position.\"\"\"
    total, result = 0.0, []
    for index, value in enumerate(values):
        total += value
        if index >= window:
            total -= values[index - window]
        result.append(total / min(index + 1, window))
    return result

Question: A train leaves at 9:40 and travels 210 kilometres at 84 kilometres per hour. When does it arrive?
Answer: 210 / 84 = 2.5 hours, which is 2 hours and 30 minutes. 9:40 plus 2:30 is 12:10, so the train arrives \
at 12:10.

Dear Ms. Okafor,

Thank you for your letter of 3 March. We have checked the invoice you mention (no. 20417) and found that the \
discount of 5 % was indeed not applied. A corrected invoice is attached; the difference of 38.60 euros will be \
refunded to your account within ten working days. Please accept our apologies for the inconvenience.

Ingredients: 400 g flour, 1 teaspoon salt, 7 g dried yeast, 280 ml lukewarm water, 2 tablespoons olive oil. \
Mix the flour, salt and yeast. Add water and oil, knead for ten minutes, and let the dough rise under a cloth \
until it has doubled. Shape it, brush it with oil, and bake it at 230 degrees for about twenty minutes.

In the summer of 1816, after the eruption of Tambora the year before, snow fell in New England in June, \
harvests failed across Europe, and the price of grain doubled. Historians still debate how much of the unrest \
that followed can be laid at the volcano's door. What is certain is that many families left their farms that \
autumn and never came back.

{"name": "sensor-7", "readings": [{"t": 1700000000, "celsius": 21.4}, {"t": 1700000060, "celsius": 21.6}], \
"ok": true}

1. Open the settings and choose Network.
2. Select the connection that is marked as active.
3. Enter the address of the proxy, a colon, and the port; leave the user name empty unless you were given one.
4. Save, wait a moment, and try to load any page. If it fails, restore the previous values and ask for help.

The theorem says that every continuous function on a closed interval attains its maximum. Suppose it did not: \
then for every n there would be a point where the function exceeds n, and these points would have a convergent \
subsequence. At its limit the function would have to be infinite, which contradicts continuity. Hence the \
supremum is finite, and the same argument applied to values that approach it shows that it is attained.
"""
